"""What captured steps keep between calls: who may use it, and that nobody's cache is overwritten.

Without a GPU a stand-in takes the place of the captured graph: its replay runs the step's operations on the tensors of
its *capture*, as a graph would, and fails if a pool of the present cache lies anywhere else.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import hf_paged_attention
from hf_paged_attention import PagedCache, captured_step, graph_decoding
from tests.families.models import build, prompts
from tests.families.modes import returned_cache

NEW = {"max_new_tokens": 12, "do_sample": False}
LONG = (70, 66)  # past the tokens on which 8-bit factors are fitted


class Graphs:
    """Counts captures, and stands in for them."""

    def __init__(self, monkeypatch):
        self.captures = self.replays = 0
        monkeypatch.setattr(captured_step, "capture", self.capture)
        monkeypatch.setattr(captured_step.CapturedStep, "__init__", self._captures(captured_step.CapturedStep.__init__))

    @staticmethod
    def _captures(init):
        return lambda step, captures: init(step, True)

    def capture(self, work):
        self.captures += 1
        run = dict(zip(work.__code__.co_freevars, (cell.cell_contents for cell in work.__closure__), strict=True))[
            "self"
        ]
        tokens, state = run.tokens, run.cache.sequences.device_state
        places = addresses(run.cache)
        model, forward = weakref.ref(run.model), run.model.forward
        del run, work
        return Replay(self, tokens, state, places, model, forward)


class Replay:
    def __init__(self, graphs, tokens, state, places, model, forward):
        self.graphs, self.tokens, self.state = graphs, tokens, state
        self.places, self.model, self.forward = places, model, forward

    def replay(self):
        self.graphs.replays += 1
        cache = present.cache
        assert cache.sequences.device_state is self.state
        assert addresses(cache) == self.places
        self.state.advance()
        lengths = self.state.positions
        inputs = {
            "input_ids": self.tokens.token.unsqueeze(1),
            "position_ids": (lengths + self.tokens.shift).unsqueeze(1),
            graph_decoding.CACHE_ARGUMENT: cache,
        }
        self.tokens.choose(self.model()(**inputs).logits[:, -1])


class present:
    """The cache of the step that runs now: a stand-in cannot read it from addresses."""

    cache: PagedCache


def addresses(cache):
    return [
        None if memory is None else memory.data_ptr() for layer in cache.layers for memory in layer.storage.memory()
    ]


@pytest.fixture
def graphs(monkeypatch):
    run = captured_step.CapturedStep.run

    def remembering(step, cache, work):
        present.cache = cache
        try:
            run(step, cache, work)
        finally:
            del present.cache

    monkeypatch.setattr(captured_step.CapturedStep, "run", remembering)
    return Graphs(monkeypatch)


def enabled(family="Gemma 3", **arguments):
    return expected(family, decode="graph", compile=False, **arguments)


def expected(family="Gemma 3", **arguments):
    size = 32 if arguments.get("kv_dtype") == "int4" else 16
    return hf_paged_attention.enable(build(family), block_size=size, **arguments)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3"])
def test_a_second_call_captures_nothing(graphs, family, kv_dtype):
    model, plain = enabled(family, kv_dtype=kv_dtype), expected(family, kv_dtype=kv_dtype)
    for lengths, new, seed in ((LONG, 12, 1), ((66, 69), 9, 2), ((68, 68), 11, 3)):
        arguments = {**prompts(*lengths, seed=seed), "do_sample": False, "max_new_tokens": new}
        assert torch.equal(model.generate(**arguments), plain.generate(**arguments))
    assert graphs.captures == 1
    assert graphs.replays == (12 - 2) + (9 - 1) + (11 - 1)


def test_a_longer_prompt_captures_once_more_and_both_lengths_replay_then(graphs):
    model, plain = enabled(), expected()
    for lengths in (LONG, (300, 200), LONG, (290, 120)):
        arguments = {**prompts(*lengths), **NEW}
        assert torch.equal(model.generate(**arguments), plain.generate(**arguments))
    assert graphs.captures == 2


def test_a_cache_that_is_held_is_not_overwritten(graphs):
    model, plain = enabled(), expected()
    kept = returned_cache(model.generate(**prompts(*LONG), **NEW, return_dict_in_generate=True))
    before = [layer.storage.memory()[0].clone() for layer in kept.layers]
    other = {**prompts(*LONG, seed=5), **NEW}
    assert torch.equal(model.generate(**other), plain.generate(**other))
    assert graphs.captures == 2
    assert all(torch.equal(a, layer.storage.memory()[0]) for a, layer in zip(before, kept.layers, strict=True))


def test_a_part_of_a_cache_that_is_held_is_not_overwritten(graphs):
    model = enabled()
    out = model.generate(**prompts(*LONG), **NEW, return_dict_in_generate=True)
    layer = returned_cache(out).layers[1]
    del out
    before = layer.storage.memory()[0].clone()
    model.generate(**prompts(*LONG, seed=5), **NEW)
    assert torch.equal(before, layer.storage.memory()[0])


def test_a_returned_cache_that_goes_on_replays_its_own_graph(graphs):
    model, plain = enabled(), expected()
    out = model.generate(**prompts(*LONG), **NEW, return_dict_in_generate=True)
    cache, text = returned_cache(out), out.sequences
    del out
    other = {**prompts(*LONG, seed=5), **NEW}
    model.generate(**other)  # in between: a cache and a graph of its own
    text = torch.cat([text, prompts(3, 3)["input_ids"]], 1)
    mask = torch.cat([prompts(*LONG)["attention_mask"], torch.ones(2, 15, dtype=torch.long)], 1)
    want = plain.generate(text, attention_mask=mask, **NEW)
    assert torch.equal(model.generate(text, attention_mask=mask, **NEW, past_key_values=cache), want)
    assert graphs.captures == 3  # its first call reserved for its own tokens only
    assert torch.equal(model.generate(**other), plain.generate(**other))
    text = torch.cat([want, prompts(3, 3)["input_ids"]], 1)
    mask = torch.cat([mask, torch.ones(2, text.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    want = plain.generate(text, attention_mask=mask, **NEW)
    assert torch.equal(model.generate(text, attention_mask=mask, **NEW, past_key_values=cache), want)
    assert graphs.captures == 3


def test_the_users_own_cache_replays_in_every_turn_and_takes_its_memory_along(graphs):
    model, plain = enabled(), expected()
    cache = PagedCache(model.config, block_size=16)
    text, mask = prompts(*LONG).values()
    for _ in range(3):
        want = plain.generate(text, attention_mask=mask, **NEW)
        assert torch.equal(model.generate(text, attention_mask=mask, **NEW, past_key_values=cache), want)
        text = torch.cat([want, prompts(4, 4)["input_ids"]], 1)
        mask = torch.cat([mask, torch.ones(2, text.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    assert graphs.captures == 2  # the first turn reserved for its own tokens only, the second generously
    copied = copy.deepcopy(cache)
    assert copied.arena is None
    assert torch.equal(
        plain.generate(text, attention_mask=mask, **NEW, past_key_values=copied),
        plain.generate(text, attention_mask=mask, **NEW),
    )
    memory = weakref.ref(cache.layers[1].storage.memory()[0])
    del cache, copied
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("end", ["disable", "other rows", "beams"])
def test_the_memory_is_freed(graphs, end):
    model = enabled()
    out = model.generate(**prompts(*LONG), **NEW, return_dict_in_generate=True)
    memory = weakref.ref(returned_cache(out).layers[1].storage.memory()[0])
    del out
    assert memory() is not None
    if end == "disable":
        hf_paged_attention.disable(model)
    elif end == "other rows":
        model.generate(**prompts(70), **NEW)
    else:
        model.generate(**prompts(*LONG), **NEW, num_beams=2)
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    "change",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.2},
        {"eos_token_id": 7},
        {"max_new_tokens": 200},
    ],
    ids=["sampling", "penalty", "end of sequence", "more tokens than there is room for"],
)
def test_what_a_graph_has_kept_is_captured_anew_when_it_changes(graphs, change):
    model, plain = enabled(), expected()
    for how in ({}, change, change):
        found = []
        for each in (model, plain):
            torch.manual_seed(0)
            found.append(each.generate(**prompts(*LONG), **NEW | how))
        assert torch.equal(*found)
    assert graphs.captures == 2


def test_other_weights_and_switched_modules_are_captured_anew(graphs):
    model = enabled("Llama")
    first = model.generate(**prompts(*LONG), **NEW)
    layer = model.model.layers[0]
    layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight * -1)
    second = model.generate(**prompts(*LONG), **NEW)
    assert graphs.captures == 2
    assert not torch.equal(first, second)
    model.model.layers[1].mlp.a_switch = True  # as adapters have them
    model.generate(**prompts(*LONG), **NEW)
    assert graphs.captures == 3


def test_pools_grow_while_a_call_decodes(graphs, monkeypatch):
    """A limit of many tokens costs no memory for them; each growth costs a capture."""
    monkeypatch.setattr(captured_step, "RESERVATION", 16)
    model, plain = enabled("Llama"), expected("Llama")
    arguments = {**prompts(20, 17), "do_sample": False, "max_new_tokens": 300, "return_dict_in_generate": True}
    short = {**arguments, "max_new_tokens": 20}
    cache = returned_cache(model.generate(**short, min_length=0))
    assert cache.layers[0].storage.num_blocks <= 2 * -(-40 // 16)
    del cache
    assert torch.equal(model.generate(**arguments).sequences, plain.generate(**arguments).sequences)
    assert 2 <= graphs.captures <= 10
