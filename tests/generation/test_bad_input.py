"""What cannot be done is an error that names the argument, its value and the way out, before any token is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

import hf_paged_attention
from hf_paged_attention import CacheFullError, PagedCache, enable
from hf_paged_attention.attention import NAME
from tests.families.models import COMMON, FAMILIES, build, prompts


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


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 3", "Gemma 4", "Falcon-H1", "Qwen3-Next"])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_key_value_heads": 4}, "KV heads = {}"),
        ({"head_dim": 16}, "head_dim = {}"),
        ({"num_hidden_layers": 5}, "layers = {}"),
        ({"num_hidden_layers": 2}, "layers = {}"),
        ({"sliding_window": 24}, "'sliding_attention', {}"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_the_cache_of_another_model(family, other, named):
    """Refused at the first pass, both named, with nothing stored; the cache then serves its own model."""
    name, value = next(iter(other.items()))
    kinds = FAMILIES[family][1].get("layer_types")
    if name == "num_hidden_layers" and kinds:
        other = {**other, "layer_types": (kinds * 2)[:value]}
    if family == "Gemma 4" and name == "num_hidden_layers":
        other["num_kv_shared_layers"] = 0
    second = build(family, **other)
    mine = build(family)
    if name == "sliding_window" and getattr(mine.config, name, None) is None:
        pytest.skip("the family has no windows")
    for model in (mine, second):
        model.set_attn_implementation(NAME)
    cache = PagedCache(mine.config, block_size=16)
    with pytest.raises(ValueError, match=r"another model. Build a PagedCache") as error:
        second.generate(**prompts(5, 9), past_key_values=cache, max_new_tokens=3)
    if family == "Gemma 4" and name == "head_dim":  # one a layer
        named = "head_dim = ({0}, {0}, 64, "
    was = {"num_hidden_layers": 6 if family == "Gemma 4" else 3, "sliding_window": 16, "head_dim": 32}.get(name, 2)
    assert f"{named.format(was)}" in str(error.value)
    assert f"{named.format(value)}" in str(error.value)
    assert (cache.get_seq_length(), cache.stats()["blocks_used"]) == (0, 0)
    cache.reset()
    want = mine.generate(**prompts(5, 9), max_new_tokens=3, do_sample=False)
    assert torch.equal(mine.generate(**prompts(5, 9), past_key_values=cache, max_new_tokens=3, do_sample=False), want)


def test_the_cache_of_an_equal_model(model):
    """A fine-tuned copy, and a config that was loaded anew, are the same to a cache."""
    cache = PagedCache(copy.deepcopy(model.config), block_size=16)
    other = build("Llama", seed=3, vocab_size=250, rms_norm_eps=1e-5)
    other.set_attn_implementation(NAME)
    for each in (model, other):
        cache.reset()
        want = each.generate(**prompts(9), max_new_tokens=4, do_sample=False)
        assert torch.equal(
            each.generate(**prompts(9), past_key_values=cache, max_new_tokens=4, do_sample=False),
            want,
        )


def test_a_refused_call_leaves_a_cache_of_one_layer_usable():
    model = build("Llama", num_hidden_layers=1)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config)
    with pytest.raises(ValueError, match="output_attentions"):
        model.generate(**prompts(9), past_key_values=cache, max_new_tokens=3, output_attentions=True)
    model.generate(**prompts(9), past_key_values=cache, max_new_tokens=3)


@pytest.mark.parametrize("way", ["PagedCache", "enable"])
def test_a_backend_that_is_not_registered(model, way, monkeypatch):
    build_with = {"PagedCache": lambda **a: PagedCache(model.config, **a), "enable": lambda **a: enable(model, **a)}[
        way
    ]
    with pytest.raises(ValueError, match=r"backend='tritn'.*'auto' or one of 'triton', 'reference'"):
        build_with(backend="tritn")
    monkeypatch.setenv("HF_PAGED_ATTENTION_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"HF_PAGED_ATTENTION_BACKEND='cuda'.*'triton', 'reference'"):
        build_with()
    assert not hasattr(model, "_hf_paged_attention")
    monkeypatch.setenv("HF_PAGED_ATTENTION_BACKEND", "reference")
    build_with()


def test_a_narrower_window_than_the_model(model):
    config = AutoConfig.for_model("mistral", **{**COMMON, "sliding_window": 16})
    with pytest.raises(ValueError, match=r"'sliding_attention', 16.*'full_attention'.*another"), torch.no_grad():
        model(**prompts(5), past_key_values=PagedCache(config))


def test_a_head_size_that_no_kernel_takes_is_a_named_fallback_or_an_error():
    model = build("Llama", head_dim=1024, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    model.set_attn_implementation(NAME)
    arguments = {"max_new_tokens": 2, "do_sample": False}
    with pytest.raises(NotImplementedError, match=r"head size 1024"):
        model.generate(**prompts(3), past_key_values=PagedCache(model.config, backend="triton"), **arguments)
