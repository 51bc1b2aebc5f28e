"""`decode="graph"` gives what plain generate gives (uncompiled and uncaptured here: the steps are the same)."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

import hf_paged_attention
from hf_paged_attention import CacheFullError, PagedCache, graph_decoding
from tests.families.models import build, prompts

NEW = {"max_new_tokens": 40, "do_sample": False}


def pair(family: str, **arguments):
    arguments = {"block_size": 16, **arguments}
    graph = hf_paged_attention.enable(build(family), decode="graph", compile=False, **arguments)
    return build(family), graph


def same(family: str, **how) -> bool:
    inputs, found = how.pop("inputs", None) or prompts(5, 17, 40), []
    for model in pair(family):
        torch.manual_seed(0)
        found.append(model.generate(**inputs, **NEW | how))
    return torch.equal(*found)


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"max_new_tokens": 1},
        {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"num_beams": 3, "max_new_tokens": 8},
    ],
    ids=["greedy", "one token", "sampling", "penalty", "beams"],
)
def test_the_tokens_of_eager_generate(family, how):
    assert same(family, **how)


def test_a_compiled_step_gives_the_same_and_is_compiled_once():
    eager = build("Gemma 3")
    graph = hf_paged_attention.enable(build("Gemma 3"), block_size=16, decode="graph")
    for lengths, stance in (((20, 13), "default"), ((40, 33), "fail_on_recompile")):
        want = eager.generate(**prompts(*lengths), **NEW)
        with torch.compiler.set_stance(stance):
            assert torch.equal(graph.generate(**prompts(*lengths), **NEW), want)


def test_rows_end_at_their_end_of_sequence_and_the_cache_holds_no_more():
    eager, graph = pair("Mistral")
    free = eager.generate(**prompts(5, 17, 40), **NEW)
    ends = [int(free[0, -30]), int(free[1, -20]), int(free[2, -10])]
    want = eager.generate(**prompts(5, 17, 40), **NEW, eos_token_id=ends)
    cache = PagedCache(graph.config, block_size=16)
    got = graph.generate(**prompts(5, 17, 40), **NEW, eos_token_id=ends, past_key_values=cache)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == want.shape[1] - 1
    cache.reset()
    assert cache.stats()["blocks_used"] == 0


def test_a_streamer_gets_the_same_tokens():
    eager, graph = pair("Llama")
    streams = [Streamer(), Streamer()]
    for model, stream in zip((eager, graph), streams, strict=True):
        model.generate(**prompts(9), **NEW, streamer=stream)
    assert streams[0].ended
    assert vars(streams[0]) == vars(streams[1])


def test_a_full_cache_half_way_can_be_reset_and_used():
    eager, graph = pair("Llama")
    cache = PagedCache(graph.config, block_size=16, max_blocks=9)
    with pytest.raises(CacheFullError):
        graph.generate(**prompts(5, 17, 40), past_key_values=cache, **NEW | {"max_new_tokens": 100})
    cache.reset()
    assert cache.stats()["blocks_used"] == 0
    short = {**NEW, "max_new_tokens": 5}
    got = graph.generate(**prompts(9, 12), past_key_values=cache, **short)
    assert torch.equal(got, eager.generate(**prompts(9, 12), **short))


def test_int8_short_prompts_are_those_of_plain_decoding():
    _, graph = pair("Gemma 3", kv_dtype="int8")
    plain = hf_paged_attention.enable(build("Gemma 3"), block_size=16, kv_dtype="int8")
    new = {**NEW, "max_new_tokens": 80}
    assert torch.equal(graph.generate(**prompts(1, 2, 3), **new), plain.generate(**prompts(1, 2, 3), **new))


@pytest.mark.parametrize("kv_dtype", ["int4", ("int8", "int4"), ("int4", "int8")])
def test_int4_tokens_are_those_of_plain_decoding(kv_dtype):
    """Blocks are encoded within the captured step, also after a crop that left one encoded early."""
    _, graph = pair("Gemma 3", kv_dtype=kv_dtype, block_size=32, exact_layers=(0,))
    plain = hf_paged_attention.enable(build("Gemma 3"), block_size=32, kv_dtype=kv_dtype, exact_layers=(0,))
    inputs, found = prompts(5, 17, 70), []
    for model in (graph, plain):
        cache = PagedCache(model.config, block_size=32, kv_dtype=kv_dtype, exact_layers=(0,))
        cache.activate_past_recording()
        arguments = {**NEW, "max_new_tokens": 90, "past_key_values": cache}
        ids = model.generate(**inputs, **arguments)
        cache.crop(-10)
        more = {
            "input_ids": ids[:, :-4],
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 86), value=1),
        }
        found.append((model.generate(**more, **arguments), cache.sequences.lengths))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_positions_of_the_callers_own_go_on():
    inputs = prompts(5, 17, 40)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) * 3
    assert same("Llama", inputs=inputs)


def test_embeddings_in_the_place_of_tokens():
    embed = build("Llama").get_input_embeddings()
    ids, mask = prompts(5, 17, 40).values()
    assert same("Llama", inputs={"inputs_embeds": embed(ids).detach(), "attention_mask": mask})


def test_a_penalty_that_ignores_the_prompt():
    inputs = prompts(40, 40)
    penalty = RepetitionPenaltyLogitsProcessor(1e9, prompt_ignore_length=40)
    favourites = SuppressTokensLogitsProcessor([t for t in range(211) if t not in (int(inputs["input_ids"][0, 0]), 7)])
    assert same("Llama", inputs=inputs, logits_processor=[favourites, penalty], max_new_tokens=2)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_an_exception_in_a_step_loses_that_step_alone(family):
    eager, graph = pair(family)
    inputs, calls = prompts(5, 17, 40), []

    def hook(*_):
        calls.append(1)
        if len(calls) == 6:
            raise InterruptedError

    cache = PagedCache(graph.config, block_size=16)
    handle = graph.model.layers[1].mlp.register_forward_pre_hook(hook)
    with pytest.raises(InterruptedError):
        graph.generate(**inputs, past_key_values=cache, **NEW)
    handle.remove()
    want = eager.generate(**inputs, **NEW)
    assert cache.get_seq_length() == 44
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 5, dtype=torch.long)], 1)
    rest = {**NEW, "max_new_tokens": 35}
    got = graph.generate(want[:, :45], attention_mask=mask, past_key_values=cache, **rest)
    assert torch.equal(got, want)


def test_a_block_whose_encoding_an_exception_ended_is_encoded_by_the_next_step():
    _, graph = pair("Llama", kv_dtype="int4", block_size=32)
    plain = hf_paged_attention.enable(build("Llama"), block_size=32, kv_dtype="int4")
    inputs, calls = prompts(90), []

    def hook(*_):
        calls.append(1)
        if len(calls) == 1 + 6:  # the step that brings the 96th token, and so encodes the first 32
            raise InterruptedError

    cache = PagedCache(graph.config, block_size=32, kv_dtype="int4")
    handle = graph.model.layers[1].mlp.register_forward_pre_hook(hook)
    with pytest.raises(InterruptedError):
        graph.generate(**inputs, past_key_values=cache, **NEW)
    handle.remove()
    assert cache.get_seq_length() == 95
    assert cache.sequences.tail.sealed == [0]
    want = plain.generate(**inputs, **NEW)
    mask = torch.ones(1, 96, dtype=torch.long)
    rest = {**NEW, "max_new_tokens": 34}
    assert torch.equal(graph.generate(want[:, :96], attention_mask=mask, past_key_values=cache, **rest), want)
    assert cache.sequences.tail.sealed == [64]


@pytest.mark.parametrize("end", [14, 15])
def test_steps_too_many_are_cropped_behind_a_window_too(end, monkeypatch):
    """As on a GPU, whether all rows have finished is read one step late, while int8 factors are still fitted."""

    def look(watcher):
        watcher._pending.append((watcher.run.tokens.all_finished.clone(), None, None))
        if len(watcher._pending) > 1:
            watcher._read()

    monkeypatch.setattr(graph_decoding._Watcher, "look", look)
    plain = hf_paged_attention.enable(build("Mistral"), block_size=16, kv_dtype="int8")
    _, graph = pair("Mistral", kv_dtype="int8")
    inputs = prompts(16)
    token = int(plain.generate(**inputs, **NEW)[0, 16 + end])
    want = plain.generate(**inputs, **NEW, eos_token_id=token)
    assert torch.equal(graph.generate(**inputs, **NEW, eos_token_id=token), want)
