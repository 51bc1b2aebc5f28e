"""What cannot be done is an error that names the argument, its value and the way out, before any token is computed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

import hf_paged_attention
from hf_paged_attention import CacheFullError, PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import COMMON, build, prompts


@pytest.fixture
def model():
    model = build("Llama")
    model.set_attn_implementation(NAME)
    return model


@pytest.fixture
def no_token(model):
    """Fails the test if the language-model head is reached: no token may have been computed."""
    reached = []
    handle = model.lm_head.register_forward_pre_hook(lambda *_: reached.append(True))
    yield
    handle.remove()
    assert not reached


def caches(model):
    return [PagedCache(model.config, block_size=16), None]


@pytest.mark.usefixtures("no_token")
def test_output_attentions(model):
    for cache in caches(model):
        with pytest.raises(ValueError, match=r'output_attentions.*"eager"'):
            model.generate(**prompts(5), past_key_values=cache, max_new_tokens=3, output_attentions=True)
        with pytest.raises(ValueError, match=r'output_attentions=True.*"eager"'):
            model(**prompts(5), past_key_values=cache, output_attentions=True)


@pytest.mark.usefixtures("no_token")
def test_a_4d_mask(model):
    mask = torch.zeros(1, 1, 5, 5)
    for cache in caches(model):
        with pytest.raises(ValueError, match=r'\(1, 1, 5, 5\).*2D padding mask.*"sdpa"'):
            model(prompts(5)["input_ids"], attention_mask=mask, past_key_values=cache)


@pytest.mark.usefixtures("no_token")
def test_a_mask_that_is_too_short(model):
    cache = PagedCache(model.config)
    with torch.no_grad():
        model.model(prompts(10)["input_ids"], past_key_values=cache)
        with pytest.raises(ValueError, match=r"attention_mask has 3 columns.*10 tokens are cached and 3 are new.*13"):
            model(prompts(3)["input_ids"], attention_mask=torch.ones(1, 3), past_key_values=cache)


@pytest.mark.usefixtures("no_token")
def test_dropout_in_training_mode(model):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    for cache in caches(model):
        with pytest.raises(ValueError, match=r"dropout=0.1 \(training mode\).*model.eval\(\)"), torch.no_grad():
            model(**prompts(5), past_key_values=cache)


@pytest.mark.usefixtures("no_token")
def test_gradients(model):
    model.train()
    for cache in caches(model):
        with pytest.raises(NotImplementedError, match=r'no gradients.*no_grad.*"sdpa"'):
            model(**prompts(5), past_key_values=cache)


@pytest.mark.usefixtures("no_token")
def test_an_unknown_kv_dtype_in_enable(model):
    with pytest.raises(ValueError, match=r"kv_dtype='int3'.*'int8'"):
        hf_paged_attention.enable(model, kv_dtype="int3")
    assert "_prepare_cache_for_generation" not in vars(model)


def test_max_blocks_too_small():
    model, cache = build("Llama"), None
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16, max_blocks=1)
    with pytest.raises(CacheFullError, match="max_blocks=1"):
        model.generate(**prompts(17), past_key_values=cache, max_new_tokens=3)
    assert cache.get_seq_length() == 0
    inputs = prompts(10)
    got = model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
    model.set_attn_implementation("eager")
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=5, do_sample=False))


def test_an_encoder_decoder_model():
    config = AutoConfig.for_model("t5", vocab_size=99, d_model=32, d_ff=32, num_layers=2, num_heads=2, d_kv=16)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"encoder-decoder model .t5."):
        hf_paged_attention.enable(model)
    with pytest.raises(ValueError, match=r"encoder-decoder model .t5."):
        PagedCache(model.config)


def test_a_model_that_does_not_generate():
    model = AutoModel.from_config(AutoConfig.for_model("bert", hidden_size=32, num_attention_heads=2))
    with pytest.raises(TypeError, match=r"BertModel.*causal language model"):
        hf_paged_attention.enable(model)


def test_a_bidirectional_model():
    config = AutoConfig.for_model("bert", hidden_size=32, intermediate_size=32, num_attention_heads=2)
    model = AutoModel.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(NotImplementedError, match=r'bidirectional.*"sdpa"'), torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))


def test_an_interior_gap_in_the_mask_of_another_cache(model):
    inputs = prompts(8, 8)
    inputs["attention_mask"][1, 3] = 0
    with pytest.raises(ValueError, match=r"between real tokens in rows \[1\].*PagedCache"), torch.no_grad():
        model.generate(**inputs, max_new_tokens=3)


def test_a_model_that_runs_another_attention(model):
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match=r"set_attn_implementation\(.paged_triton.\)"):
        model.generate(**prompts(5), past_key_values=PagedCache(model.config), max_new_tokens=3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_key_value_heads": 4}, "another model"),
        ({"head_dim": 16}, "another model"),
        ({"num_hidden_layers": 5}, "another model"),
    ],
)
def test_the_cache_of_another_model(model, other, message):
    cache = PagedCache(model.config)
    with torch.no_grad():
        model(**prompts(5), past_key_values=cache)
    second = build("Llama", **other)
    second.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        second(prompts(3)["input_ids"], past_key_values=cache)


def test_the_cache_of_a_model_with_more_layers(model):
    """It never sees its last layers: the third pass says so at the latest."""
    deeper = AutoConfig.for_model("llama", **{**COMMON, "num_hidden_layers": 5})
    with pytest.raises(RuntimeError, match=r"layers \[3, 4\].*fewer attention layers than its config"):
        model.generate(**prompts(5), past_key_values=PagedCache(deeper), max_new_tokens=4)


def test_a_narrower_window_than_the_model(model):
    config = AutoConfig.for_model("mistral", **{**COMMON, "sliding_window": 16})
    with pytest.raises(ValueError, match=r"all keys.*sliding window of 16"), torch.no_grad():
        model(**prompts(5), past_key_values=PagedCache(config))


def test_a_head_size_that_no_kernel_takes_is_a_named_fallback_or_an_error():
    model = build("Llama", head_dim=1024, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    model.set_attn_implementation(NAME)
    arguments = {"max_new_tokens": 2, "do_sample": False}
    with pytest.raises(NotImplementedError, match=r"head size 1024"):
        model.generate(**prompts(3), past_key_values=PagedCache(model.config, backend="triton"), **arguments)
