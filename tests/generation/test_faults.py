"""Exceptions inside a forward pass, and models in threads."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_paged_attention import CacheFullError, PagedCache
from hf_paged_attention.attention import NAME
from hf_paged_attention.cache.layer import PagedLayer
from tests.families.models import COMMON, build, prompts

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


def parts_of(model) -> dict[str, torch.nn.Module]:
    """Where a hook may raise: before and inside each layer, in its mixers too, and after the last one."""
    found = {"lm_head": model.lm_head}
    for number, layer in enumerate(model.model.layers):
        found[f"{number}"] = layer
        for name, child in layer.named_children():
            found[f"{number}.{name}"] = child
            if name in ("linear_attn", "mamba", "conv", "self_attn"):
                inside = dict(child.named_children())
                found |= {f"{number}.{name}.{end}": inside[end] for end in ("in_proj", "out_proj") if end in inside}
    return found


STATEFUL = ["Qwen3-Next", "Falcon-H1", "LFM2", "DeepSeek-V3"]


def build_granite_hybrid():
    """Mamba in the last layer: no keys tell of the end of a pass."""
    options = {
        **COMMON,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("granitemoehybrid", **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize("when", [0, 3], ids=["prompt", "third token"])
@pytest.mark.parametrize("family", [*STATEFUL, "Granite 4 hybrid"])
def test_states_that_cannot_be_put_back_are_never_continued_from(family, when):
    """An exception anywhere: the next pass is refused with a way out, or says what it would have said."""
    model, inputs = build_granite_hybrid() if "hybrid" in family else build(family), prompts(21)
    want = model.generate(**inputs, **NEW)
    model.set_attn_implementation(NAME)
    refused = 0
    for place, part in parts_of(model).items():
        if (
            when and place == "2.mamba.in_proj"
        ):  # the last state is written in place, without a word: see docs/design.md
            continue
        calls = iter(range(100))

        def hook(*_, calls=calls):
            if next(calls) == when:
                raise Interrupted

        handle, cache = part.register_forward_pre_hook(hook), PagedCache(model.config, block_size=16)
        try:
            model.generate(**inputs, past_key_values=cache, **NEW)
        except Interrupted:
            pass
        else:
            assert next(calls) <= when, place  # a part that never ran: an expert, say
            continue
        finally:
            handle.remove()
        # On from what the cache says that it holds; all of the text where that is nothing.
        held, out, said = cache.get_seq_length(), None, ""
        try:
            with torch.no_grad():
                out = model(want[:, held : held + 5], past_key_values=cache, use_cache=True)
        except RuntimeError as error:
            said = str(error)
        if out is None:
            assert "Call reset()" in said, place
            refused += 1
            with pytest.raises((RuntimeError, ValueError), match=r"reset\(\)|tokens are cached"):
                model.generate(**inputs, past_key_values=cache, **NEW)
        else:
            got = out.logits[0].argmax(-1)
            first = max(0, 20 - held)
            assert torch.equal(got[first:], want[0, held + first + 1 : held + 6]), place
        cache.reset()
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **NEW), want), place
    assert refused > 3


@pytest.mark.parametrize("family", STATEFUL[:3])
def test_a_full_cache_with_states_is_usable_after_reset(family):
    model = build(family)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16, max_blocks=1)
    with pytest.raises(CacheFullError):
        model.generate(**prompts(17), past_key_values=cache, **NEW)
    with pytest.raises(RuntimeError, match=r"Call reset\(\)"):
        model.generate(**prompts(3), past_key_values=cache, **NEW)
    cache.reset()
    got = model.generate(**prompts(3), past_key_values=cache, **NEW)
    model.set_attn_implementation("eager")
    assert torch.equal(got, model.generate(**prompts(3), **NEW))


def test_states_that_a_family_keeps_elsewhere_are_not_waited_for():
    """RecurrentGemma's, in the last layer: the second pass must not be refused."""
    options = {**COMMON, "num_hidden_layers": 4, "attention_window_size": 16, "lru_width": 64}
    config = AutoConfig.for_model("recurrent_gemma", **options)
    if isinstance(PagedCache(config).layers[-1], PagedLayer):
        pytest.skip("this version's config does not tell which layers are recurrent")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    inputs = prompts(21)
    want = model.generate(**inputs, **NEW)
    model.set_attn_implementation(NAME)
    assert torch.equal(model.generate(**inputs, past_key_values=PagedCache(config, block_size=16), **NEW), want)


@pytest.mark.parametrize("family", STATEFUL[:3])
def test_rows_of_a_stateful_cache_repeated_and_selected(family):
    """Of Transformers' own layers too, which know reordering alone."""
    model, ids = build(family), prompts(17, 17)["input_ids"]
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([True, False, True, True]))
        more = torch.randint(3, 200, (3, 4), generator=torch.Generator().manual_seed(0))
        got = model(more, past_key_values=cache, use_cache=True).logits
        model.set_attn_implementation("eager")
        want = model(torch.cat([ids[[0, 1, 1]], more], 1)).logits[:, -4:]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


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
