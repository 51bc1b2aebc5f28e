"""The ways to call `generate`: each computes the same thing under eager attention and from pages, and compares.

A mode takes the model and a function that builds a fresh `PagedCache` for it. `MODES` gives each its name in
docs/families.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_paged_attention
from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import VOCABULARY, prompts

NEW = {"max_new_tokens": 20, "do_sample": False}
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
BATCH = (5, 17, 40)  # left-padded, across the window of 16
MODES: dict[str, Callable] = {}


def mode(name: str):
    def add(function):
        MODES[name] = function
        return function

    return add


def eager(model, inputs, **arguments):
    model.set_attn_implementation("eager")
    return model.generate(**inputs, **{**NEW, **arguments})


def paged(model, inputs, cache=None, **arguments):
    model.set_attn_implementation(NAME)
    if cache is not None:
        arguments["past_key_values"] = cache
    return model.generate(**inputs, **{**NEW, **arguments})


def new_cache(model, **arguments) -> PagedCache:
    return PagedCache(model.config, block_size=16, **arguments)


def same(model, inputs, **arguments):
    """Eager's tokens, from a PagedCache."""
    want = eager(model, inputs, **arguments)
    assert torch.equal(paged(model, inputs, new_cache(model), **arguments), want)


@mode("greedy")
def greedy(model):
    same(model, prompts(*BATCH))


@mode("name alone")
def name_alone(model):
    """The attention implementation alone, with whatever cache generate builds."""
    inputs = prompts(*BATCH)
    want = eager(model, inputs)
    assert torch.equal(paged(model, inputs), want)


@mode("enable")
def enabled(model):
    inputs = prompts(*BATCH)
    want = eager(model, inputs)
    hf_paged_attention.enable(model, block_size=16)
    try:
        out = model.generate(**inputs, **NEW, return_dict_in_generate=True)
    finally:
        hf_paged_attention.disable(model)
    assert isinstance(returned_cache(out), PagedCache)
    assert torch.equal(out.sequences, want)
    assert model.config._attn_implementation == "eager"


@mode("logits in chunks")
@torch.no_grad()
def logits_in_chunks(model):
    ids = prompts(48)["input_ids"]
    model.set_attn_implementation("eager")
    want = chunk_logits(model, ids, None)
    model.set_attn_implementation(NAME)
    cache = new_cache(model)
    torch.testing.assert_close(chunk_logits(model, ids, cache), want, **TOLERANCE)
    assert cache.get_seq_length() == 48


def chunk_logits(model, ids, cache, sizes=(9, 1, 30, 1, 7)):
    parts, start = [], 0
    for size in sizes:
        out = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
        cache = out.past_key_values if cache is None else cache
        parts.append(out.logits)
        start += size
    return torch.cat(parts, 1)


@mode("beams")
def beams(model):
    same(model, prompts(*BATCH), num_beams=3, num_return_sequences=2)


@mode("sampling")
def sampling(model):
    """Three samples a prompt, from the same seed."""
    inputs, arguments = prompts(*BATCH), {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3}
    torch.manual_seed(7)
    want = eager(model, inputs, **arguments)
    torch.manual_seed(7)
    assert torch.equal(paged(model, inputs, new_cache(model), **arguments), want)


@mode("prompt lookup")
def prompt_lookup(model):
    ids = prompts(11)["input_ids"].repeat(1, 4)
    same(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prompt_lookup_num_tokens=4)


@mode("assisted")
def assisted(model):
    """A draft that often agrees, the model itself with a little noise, on a paged cache of its own."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.01)
    inputs = prompts(37)
    want = eager(model, inputs)
    hf_paged_attention.enable(draft, block_size=16)
    assert torch.equal(paged(model, inputs, new_cache(model), assistant_model=draft), want)


@mode("prefill chunks")
def prefill_chunks(model):
    same(model, prompts(*BATCH), prefill_chunk_size=12)


@mode("inputs_embeds")
def inputs_embeds(model):
    inputs = prompts(*BATCH)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    same(model, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]})


@mode("use_cache=False")
def without_cache(model):
    inputs = prompts(*BATCH)
    want = eager(model, inputs, use_cache=False, max_new_tokens=6)
    assert torch.equal(paged(model, inputs, use_cache=False, max_new_tokens=6), want)


@mode("static cache")
def static_cache(model):
    inputs, arguments = prompts(*BATCH), {"cache_implementation": "static", "disable_compile": True}
    want = eager(model, inputs, **arguments)
    assert torch.equal(paged(model, inputs, **arguments), want)


@mode("streamer")
def streamer(model):
    class Collector(BaseStreamer):
        def __init__(self):
            self.tokens = []
            self.ended = False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    collector, inputs = Collector(), prompts(21)
    want = eager(model, inputs)
    paged(model, inputs, new_cache(model), streamer=collector)
    assert collector.tokens == want[0].tolist()
    assert collector.ended


@mode("stopping criteria")
def stopping_criteria(model):
    class AtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 47)

    same(model, prompts(*BATCH), stopping_criteria=StoppingCriteriaList([AtLength()]))


@mode("returned dict")
def returned_dict(model):
    inputs = prompts(*BATCH)
    arguments = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    want = eager(model, inputs, **arguments)
    cache = new_cache(model)
    got = paged(model, inputs, cache, **arguments)
    assert returned_cache(got) is cache
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **TOLERANCE)
    assert cache.get_seq_length() == got.sequences.shape[1] - 1


def returned_cache(out):
    cache = getattr(out, "cache", None)
    return cache if cache is not None else out.past_key_values


@mode("chat")
def chat(model):
    """Two turns on one cache are one eager run over the whole text; after reset the cache starts over."""
    first = prompts(21)
    want_first = eager(model, first, max_new_tokens=9)
    cache = new_cache(model)
    turn = paged(model, first, cache, max_new_tokens=9)
    assert torch.equal(turn, want_first)
    more = torch.randint(3, VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([turn, more], 1)
    second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(paged(model, second, cache, max_new_tokens=12), eager(model, second, max_new_tokens=12))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(paged(model, first, cache, max_new_tokens=9), want_first)


@mode("crop")
@torch.no_grad()
def crop(model):
    """The newest 11 of 30 tokens taken back, past the window, then written again."""
    ids = prompts(30)["input_ids"]
    model.set_attn_implementation("eager")
    want = model(ids).logits[:, 19:]
    model.set_attn_implementation(NAME)
    cache = new_cache(model)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    model(ids, past_key_values=cache, use_cache=True)
    cache.crop(-11)
    assert cache.get_seq_length() == 19
    torch.testing.assert_close(model(ids[:, 19:], past_key_values=cache, use_cache=True).logits, want, **TOLERANCE)


@torch.no_grad()
def format_agrees(model, kv_dtype, floor: float):
    """Next-token agreement with the exact model, the prompt's keys and values read back from the cache."""
    ids = prompts(100)["input_ids"]
    model.set_attn_implementation("eager")
    want = model(ids).logits
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=32, kv_dtype=kv_dtype)  # int4 keys come in groups of 32 tokens
    parts = [model(ids[:, i : i + 25], past_key_values=cache, use_cache=True).logits for i in range(0, 100, 25)]
    got = torch.cat(parts, 1)
    assert torch.isfinite(got).all()
    agree = (want.argmax(-1) == got.argmax(-1)).float().mean().item()
    assert agree >= floor, f"{kv_dtype}: next-token agreement {agree:.3f}"
    assert not cache._paged or not torch.equal(want, got), f"the {kv_dtype} cache was not read"


# The weights are random and large, so a small error moves many tokens: the floors catch a broken format, and
# eval/perplexity.py measures a good one on real weights.
FORMATS = {"fp16": 0.9, "bf16": 0.7, "int8": 0.6, "fp8": 0.4, "int4": 0.4, "int8:int4": 0.4}
for _name, _floor in FORMATS.items():
    _kv_dtype = tuple(_name.split(":")) if ":" in _name else _name
    MODES[_name] = lambda model, kv_dtype=_kv_dtype, floor=_floor: format_agrees(model, kv_dtype, floor)
