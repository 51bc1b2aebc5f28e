"""The text side of a vision-language model: text prompts work, an image's bidirectional mask is refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import COMMON, MIXED, prompts

IMAGE_TOKEN = 210
PATCHES = 4


@pytest.fixture(scope="module")
def model():
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**COMMON, "query_pre_attn_scalar": 32, **MIXED},
        vision_config=vision,
        mm_tokens_per_image=PATCHES,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=208,
        eoi_token_index=209,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def test_a_text_prompt(model):
    arguments = {"max_new_tokens": 10, "do_sample": False}
    inputs = prompts(5, 17, 40)
    inputs["input_ids"].clamp_(max=207)
    model.set_attn_implementation("eager")
    want = model.generate(**inputs, **arguments)
    model.set_attn_implementation(NAME)
    assert torch.equal(model.generate(**inputs, **arguments), want)
    cache = PagedCache(model.config, block_size=16)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **arguments), want)


@pytest.mark.parametrize("paged", [True, False])
def test_an_image_prompt_is_refused_by_name(model, paged):
    ids = prompts(20)["input_ids"].clamp(max=207)
    ids[0, 3 : 3 + PATCHES] = IMAGE_TOKEN
    types = (ids == IMAGE_TOKEN).long()
    text = model.model.language_model if hasattr(model.model, "language_model") else model.language_model
    for part in (model, text):
        part.set_attn_implementation(NAME)
    for config in (model.config.vision_config,):
        config._attn_implementation = "eager"
    cache = PagedCache(model.config, block_size=16) if paged else None
    with pytest.raises(NotImplementedError, match=r'mask .* neither causal nor.*"sdpa"'), torch.no_grad():
        model(ids, pixel_values=torch.rand(1, 3, 16, 16), token_type_ids=types, past_key_values=cache)
