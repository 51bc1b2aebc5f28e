"""Exceptions inside a forward pass, and models in threads."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import build, prompts

NEW = {"max_new_tokens": 12, "do_sample": False}


class Interrupted(Exception):
    pass


def raise_at(model, layer: int, part: str):
    """A user's hook that raises in layer `layer` of the next forward pass."""

    def hook(*_):
        raise Interrupted

    block = model.model.layers[layer]
    return (block if part == "block" else getattr(block, part)).register_forward_pre_hook(hook)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 3", "Gemma 3n", "Gemma 4"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_hook_that_raises_costs_nothing(family, layer):
    """In the prompt and later, in the block and after attention: the next generate gives eager's tokens."""
    model, inputs = build(family), prompts(5, 17, 40)
    want = model.generate(**inputs, **NEW)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    handle = raise_at(model, layer, "mlp" if layer < 2 else "block")
    with pytest.raises(Interrupted):
        model.generate(**inputs, past_key_values=cache, **NEW)
    handle.remove()
    assert cache.get_seq_length() == 0
    first = model.generate(**inputs, past_key_values=cache, **NEW)
    assert torch.equal(first, want)

    held = cache.get_seq_length()
    more = torch.cat([first, first[:, :9]], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, more.shape[1] - 40, dtype=torch.long)], 1)
    handle = raise_at(model, layer, "block")
    with pytest.raises(Interrupted):
        model.generate(more, attention_mask=mask, past_key_values=cache, **NEW)
    handle.remove()
    assert cache.get_seq_length() == held
    got = model.generate(more, attention_mask=mask, past_key_values=cache, **NEW)
    model.set_attn_implementation("eager")
    assert torch.equal(got, model.generate(more, attention_mask=mask, **NEW))


@pytest.mark.parametrize("family", ["Falcon-H1", "DeepSeek-V3"])
@pytest.mark.parametrize("layer", [1, 2])
def test_layers_that_cannot_be_put_back_say_so(family, layer):
    model, inputs = build(family), prompts(21)
    want = model.generate(**inputs, **NEW)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    handle = raise_at(model, layer, "block")
    with pytest.raises(Interrupted):
        model.generate(**inputs, past_key_values=cache, **NEW)
    handle.remove()
    with pytest.raises((RuntimeError, ValueError), match=r"ended between layers .*reset\(\)|21 tokens are cached"):
        model.generate(**inputs, past_key_values=cache, **NEW)
    cache.reset()
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **NEW), want)


def test_two_models_in_two_threads_each_with_its_own_cache():
    jobs = {}
    for name, family in (("first", "Gemma 3"), ("second", "Llama")):
        model, inputs = build(family), prompts(5, 17, 40)
        jobs[name] = (model, inputs, model.generate(**inputs, **NEW))
        model.set_attn_implementation(NAME)
    start, got = threading.Barrier(len(jobs)), {name: [] for name in jobs}

    def work(name):
        model, inputs, _ = jobs[name]
        start.wait()
        for _ in range(4):
            got[name].append(model.generate(**inputs, past_key_values=PagedCache(model.config, block_size=16), **NEW))

    threads = [threading.Thread(target=work, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (_, _, want) in jobs.items():
        assert len(got[name]) == 4
        assert all(torch.equal(each, want) for each in got[name])


def test_one_model_in_two_threads_each_with_its_own_cache():
    model, batches = build("Mistral"), [prompts(30), prompts(9, 22)]
    wants = [model.generate(**inputs, **NEW) for inputs in batches]
    model.set_attn_implementation(NAME)
    start, got = threading.Barrier(2), [None, None]

    def work(index):
        cache = PagedCache(model.config, block_size=16)
        start.wait()
        got[index] = model.generate(**batches[index], past_key_values=cache, **NEW)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(have, want) for have, want in zip(got, wants, strict=True))
