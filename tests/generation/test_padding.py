"""Padding wherever it stands: neither stored nor attended, and the real tokens' logits are eager's."""

from __future__ import annotations

import pytest
import torch

import hf_paged_attention
from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import build, prompts

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def real_logits(model, ids, mask, cache=None):
    """Logits of the real tokens, positions counted without padding."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    return logits[mask.bool()]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 3"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("paged", [True, False], ids=["PagedCache", "name alone"])
def test_padding_on_a_side(family, side, paged):
    model, inputs = build(family), prompts(5, 17, 40)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    want = real_logits(model, ids, mask)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16) if paged else None
    torch.testing.assert_close(real_logits(model, ids, mask, cache), want, **TOLERANCE)
    if paged:
        assert cache.stats()["tokens"] == 62


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_zeros_between_real_tokens(family):
    model, ids = build(family), prompts(30, 30)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 4:9] = 0
    mask[1, ::3] = 0
    want = real_logits(model, ids, mask)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    torch.testing.assert_close(real_logits(model, ids, mask, cache), want, **TOLERANCE)
    assert cache.stats()["tokens"] == int(mask.sum())


def test_a_row_of_nothing_but_padding_disturbs_no_other():
    model, inputs = build("Gemma 3"), prompts(5, 17, 40)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].clone()
    mask[1] = 0
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("eager")
    want = model.generate(ids[[0, 2]], attention_mask=mask[[0, 2]], max_new_tokens=8, do_sample=False)
    assert torch.equal(out[[0, 2]], want)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 127])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_prompt_lengths_around_a_block(family, length):
    """One token; exactly one block; a last block with one token."""
    model, inputs = build(family), prompts(length)
    arguments = {"max_new_tokens": 18, "do_sample": False}
    want = model.generate(**inputs, **arguments)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **arguments), want)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_logits_of_1e4(scale):
    model, ids = build("Llama"), prompts(40)["input_ids"]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(scale / 10)
        want = model(ids).logits
        model.set_attn_implementation(NAME)
        got = model(ids, past_key_values=PagedCache(model.config, block_size=16)).logits
    assert torch.isfinite(got).all()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("factor", [0.0, 1e4])
def test_keys_of_zero_and_values_of_1e4_in_8_bits(kv_dtype, factor):
    """All keys zero is the mean of the values; values of 1e4 keep their relative error."""
    model, ids = build("Llama"), prompts(40)["input_ids"]
    with torch.no_grad():
        for layer in model.model.layers:
            if factor:
                layer.self_attn.v_proj.weight.mul_(factor)
                layer.self_attn.o_proj.weight.div_(factor)
            else:
                layer.self_attn.k_proj.weight.zero_()
        want = model(ids).logits
        model.set_attn_implementation(NAME)
        got = model(ids, past_key_values=PagedCache(model.config, block_size=16, kv_dtype=kv_dtype)).logits
    assert torch.isfinite(got).all()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.6


@torch.no_grad()
def test_padding_between_real_tokens_is_refused_where_windows_would_count_it():
    model = build("Mistral")
    model.set_attn_implementation(NAME)
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5] = 0
    cache = PagedCache(model.config, block_size=16)
    with pytest.raises(ValueError, match=r"attention_mask.*rows \[1\].*Pad on the left"):
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 0
    mask[1, 5], mask[1, -2:] = 1, 0  # right padding: refused once a real token follows it
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    longer = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        model(ids[:, :1], attention_mask=longer, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("way", ["PagedCache", "enable", "graph", "name alone"])
def test_generate_on_right_padding_is_refused(family, way):
    """It would choose a token after a padding token. Enabled models compute nothing, others no second token."""
    model, inputs = build(family), prompts(5, 17, 40)
    inputs = {name: value.flip(1) for name, value in inputs.items()}
    arguments = {"max_new_tokens": 4, "do_sample": False}
    reached = []
    model.lm_head.register_forward_pre_hook(lambda *_: reached.append(True))
    if way in ("enable", "graph"):
        hf_paged_attention.enable(model, block_size=16, decode="graph" if way == "graph" else "plain", compile=False)
    else:
        model.set_attn_implementation(NAME)
        if way == "PagedCache":
            arguments["past_key_values"] = PagedCache(model.config, block_size=16)
    with pytest.raises(ValueError, match=r"attention_mask.*rows \[0, 1\].*[Pp]ad on the left"):
        model.generate(**inputs, **arguments)
    assert len(reached) == (0 if way in ("enable", "graph") else 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_generate_with_zeros_between_real_tokens(enabled):
    model, ids = build("Llama"), prompts(30, 30)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 4:9] = 0
    mask[1, ::3] = 0
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    want = model.generate(ids, **arguments)
    if enabled:
        hf_paged_attention.enable(model, block_size=16)
    else:
        model.set_attn_implementation(NAME)
        arguments["past_key_values"] = PagedCache(model.config, block_size=16)
    assert torch.equal(model.generate(ids, **arguments), want)


@torch.no_grad()
def test_more_than_a_token_after_right_padding_is_eagers():
    """Whoever brings text of his own chose it himself."""
    model, inputs = build("Llama"), prompts(5, 17)
    ids, mask = inputs["input_ids"].flip(1), inputs["attention_mask"].flip(1)
    more = prompts(4, 4, seed=6)
    whole = torch.cat([mask, more["attention_mask"]], 1)
    want = real_logits(model, torch.cat([ids, more["input_ids"]], 1), whole)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16)
    first = real_logits(model, ids, mask, cache)
    positions = (whole.cumsum(1) - 1)[:, -4:]
    second = model(more["input_ids"], attention_mask=whole, position_ids=positions, past_key_values=cache).logits
    rows = torch.split(want, [9, 21])
    got = torch.split(first, [5, 17])
    for row in range(2):
        torch.testing.assert_close(torch.cat([got[row], second[row]]), rows[row], **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_draft_that_proposes_the_pad_token(family):
    """generate infers from it that the draft's prompt ends in padding: a proposal is lost, nothing is refused."""
    model, draft, inputs = build(family), build(family), prompts(30)
    arguments = {"max_new_tokens": 16, "do_sample": False}
    want = model.generate(**inputs, **arguments)
    pad = want[0, 33].item()  # a token that both choose
    for each in (model, draft):
        each.generation_config.pad_token_id = pad
        hf_paged_attention.enable(each, block_size=16)
    assert torch.equal(model.generate(**inputs, **arguments, assistant_model=draft), want)
