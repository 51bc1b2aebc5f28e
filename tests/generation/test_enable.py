"""`enable` and `disable`, and what generate builds in between."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from transformers import DynamicCache

import hf_paged_attention
from hf_paged_attention import PagedCache
from tests.families.models import build, prompts
from tests.families.modes import returned_cache

NEW = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}


def test_every_generate_builds_a_cache_of_its_own_with_the_arguments_given():
    model = hf_paged_attention.enable(build("Llama"), kv_dtype="int8", block_size=32)
    caches = [returned_cache(model.generate(**prompts(9), **NEW)) for _ in range(2)]
    assert caches[0] is not caches[1]
    assert all(isinstance(cache, PagedCache) and cache.kv_dtype == "int8" for cache in caches)
    assert caches[0].block_size == 32


def test_disable_puts_everything_back():
    model = build("Gemma 3")
    before = dict(vars(model)), vars(model.config).copy()
    hf_paged_attention.enable(model)
    assert model.config._attn_implementation == "paged_triton"
    hf_paged_attention.disable(model)
    assert dict(vars(model)) == before[0]
    assert vars(model.config) == before[1]
    assert isinstance(returned_cache(model.generate(**prompts(9), **NEW)), DynamicCache)
    hf_paged_attention.disable(model)  # once more is no error


def test_enabling_again_replaces_the_arguments():
    model = build("Llama")
    hf_paged_attention.enable(model, kv_dtype="int8")
    hf_paged_attention.enable(model, kv_dtype="fp8")
    assert returned_cache(model.generate(**prompts(9), **NEW)).kv_dtype == "fp8"
    hf_paged_attention.disable(model)
    assert model.config._attn_implementation == "eager"


def test_a_cache_that_the_call_brings_is_used():
    model = hf_paged_attention.enable(build("Llama"))
    cache = PagedCache(model.config, block_size=16)
    assert returned_cache(model.generate(**prompts(9), past_key_values=cache, **NEW)) is cache


def test_use_cache_false_and_other_implementations_are_left_alone():
    model, inputs = build("Llama"), prompts(5, 9)
    want = model.generate(**inputs, **NEW).sequences
    hf_paged_attention.enable(model)
    assert torch.equal(model.generate(**inputs, **NEW, use_cache=False).sequences, want)
    out = model.generate(**inputs, **NEW, cache_implementation="static", disable_compile=True)
    assert not isinstance(returned_cache(out), PagedCache)
    assert torch.equal(out.sequences, want)


def test_a_copied_config_of_another_model_is_not_touched():
    first, second = build("Llama"), build("Llama")
    hf_paged_attention.enable(first)
    assert second.config._attn_implementation == "eager"
    assert isinstance(returned_cache(second.generate(**prompts(5), **NEW)), DynamicCache)


@pytest.mark.parametrize("decode", ["plain", "graph"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_enabled_model_is_a_model_of_its_own(decode, copied):
    """Its prefill and its decoding compute with the copy's weights."""
    arguments = {"max_new_tokens": 12, "do_sample": False}
    paged = hf_paged_attention.enable(build("Llama"), decode=decode, compile=False, block_size=16)
    paged.generate(**prompts(9), **arguments)
    other = copied(paged)
    other.load_state_dict(build("Llama", seed=4).state_dict())
    inputs, want = prompts(20, 9), build("Llama", seed=4).generate(**prompts(20, 9), **arguments)
    assert torch.equal(other.generate(**inputs, **arguments), want)
    assert torch.equal(paged.generate(**inputs, **arguments), build("Llama").generate(**inputs, **arguments))
    hf_paged_attention.disable(other)
    assert torch.equal(other.generate(**inputs, **arguments), want)


def test_generate_keeps_its_signature_and_text():
    model = build("Llama")
    before = inspect.signature(model.generate), model.generate.__doc__
    hf_paged_attention.enable(model)
    names = [name for name in inspect.signature(model.generate).parameters if name != "self"]
    assert names == list(before[0].parameters)
    assert model.generate.__doc__ == before[1]


@pytest.mark.parametrize("decode", ["plain", "compile", "graph"])
@pytest.mark.parametrize(("prompt", "new"), [(150, 10), (20, 140)], ids=["few tokens more", "many tokens more"])
def test_pools_have_no_more_blocks_than_the_call_can_need(decode, prompt, new):
    model = hf_paged_attention.enable(build("Llama"), decode=decode, compile=False, block_size=16)
    out = model.generate(**prompts(prompt, prompt - 3), max_new_tokens=new, return_dict_in_generate=True)
    for layer in returned_cache(out).layers:
        assert layer.storage.num_blocks == 2 * -(-(prompt + new) // 16)


@pytest.mark.parametrize("decode", ["plain", "compile"])
def test_what_a_call_can_reach_survives_a_beginning_that_its_prompts_share(decode):
    model = hf_paged_attention.enable(build("Llama"), decode=decode, compile=False, block_size=16)
    texts = torch.cat([prompts(64)["input_ids"].expand(2, -1), prompts(86, 86)["input_ids"]], 1)
    inputs = {"input_ids": texts, "attention_mask": torch.ones_like(texts)}
    cache = returned_cache(model.generate(**inputs, max_new_tokens=40, return_dict_in_generate=True))
    assert cache.sequences.longest == 190
    for layer in cache.layers:
        assert layer.storage.num_blocks == layer.num_blocks_in_use == 20


def test_calls_of_one_token_do_not_copy_the_pools_for_every_block():
    model = hf_paged_attention.enable(build("Llama"))
    cache = PagedCache(model.config, block_size=16)
    ids, sizes = prompts(200)["input_ids"], set()
    for _ in range(100):
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1)
        sizes.add(cache.layers[0].storage.num_blocks)
    assert len(sizes) <= 5
