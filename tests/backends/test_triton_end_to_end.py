"""`generate` through the Triton kernels (in the interpreter without a GPU): eager's tokens, and the reference's logits.

A few small cases: the kernels have tests of their own, the families run on the reference backend.
"""

from __future__ import annotations

import numpy
import pytest
import torch
import triton

from hf_paged_attention import PagedCache, kernels
from hf_paged_attention.attention import NAME
from hf_paged_attention.backends import get_backend
from hf_paged_attention.kernels import decode_keys, rotate_heads
from hf_paged_attention.types import AttentionSpec, BatchMetadata
from tests.families.models import build, prompts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NumPy 2.4 no longer makes a number of an array with one element, which the interpreter of Triton 3.6 relies on.
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and triton.__version__ < "3.7" and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0",
    reason="Triton 3.6 does not interpret kernels with NumPy 2.4; install numpy<2.4",
)
NEW = {"max_new_tokens": 4, "do_sample": False}


def on_device(family, **overrides):
    inputs = {name: tensor.to(DEVICE) for name, tensor in prompts(3, 21).items()}
    return build(family, num_hidden_layers=2, **overrides).to(DEVICE), inputs


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {}),
        ("SmolLM", {}),
        ("Mistral", {}),
        ("Gemma 2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt-oss", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_greedy_tokens_are_eagers(family, overrides):
    model, inputs = on_device(family, **overrides)
    want = model.generate(**inputs, **NEW)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16, backend="triton")
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **NEW), want)


def test_beams_share_blocks():
    model, inputs = on_device("Mistral")
    want = model.generate(**inputs, **NEW, num_beams=2)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, block_size=16, backend="triton")
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **NEW, num_beams=2), want)


def test_another_cache_is_read_in_place(monkeypatch):
    model, inputs = on_device("Llama")
    want = model.generate(**inputs, **NEW)
    model.set_attn_implementation(NAME)
    monkeypatch.setenv("HF_PAGED_ATTENTION_BACKEND", "triton")
    assert torch.equal(model.generate(**inputs, **NEW), want)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
def test_a_format_gives_what_the_reference_gives(kv_dtype):
    model, inputs = on_device("Gemma 2", layer_types=["sliding_attention", "full_attention"])
    model.set_attn_implementation(NAME)
    logits = {}
    for backend in ("reference", "triton"):
        cache = PagedCache(model.config, block_size=16, backend=backend, kv_dtype=kv_dtype)
        with torch.no_grad():
            prompt = model(**inputs, past_key_values=cache).logits[:, -1]
            mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"][:, -1:]], 1)
            step = model(inputs["input_ids"][:, -1:], attention_mask=mask, past_key_values=cache).logits[:, -1]
        logits[backend] = torch.stack([prompt, step])
    torch.testing.assert_close(logits["triton"], logits["reference"], atol=6e-2, rtol=6e-2)


def test_queries_are_turned_where_their_keys_are_written(monkeypatch):
    """No launch of its own: only layers that read another layer's keys need one."""
    turned = []

    def counted(query, *arguments, **options):
        turned.append(query.shape)
        return rotate_heads(query, *arguments, **options)

    monkeypatch.setattr(kernels, "rotate_heads", counted)
    model, inputs = on_device("Llama")
    model.set_attn_implementation(NAME)
    model.generate(**inputs, past_key_values=PagedCache(model.config, backend="triton", kv_dtype="int8"), **NEW)
    assert not turned
    layer = PagedCache(model.config, backend="triton", kv_dtype="int8")
    with torch.no_grad():
        model(**inputs, past_key_values=layer)
    kv = layer.layers[0].kv()
    assert kv.turn_factor is not None
    assert kv.met.turn_factor is None
    query = torch.randn(1, model.config.num_attention_heads, kv.k_pool.shape[-1], device=DEVICE)
    rows = {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in
            {"query_start_loc": [0, 1], "seq_lens": [3], "block_table": [[0]]}.items()}  # fmt: skip
    batch = BatchMetadata(**rows, slot_mapping=None, max_query_len=1, max_seq_len=3, block_size=kv.k_pool.shape[1])
    spec, backend = AttentionSpec(0.3), get_backend("triton")
    alone = backend.attend(query, kv, batch, spec)
    assert turned == [query.shape]
    met = backend.attend(rotate_heads(query, kv.turn_factor, divide=False), kv.met, batch, spec)
    assert torch.equal(alone, met)


@pytest.mark.parametrize("kv_dtype", ["int4", ("int4", "int8"), ("int8", "int4")])
@torch.no_grad()
def test_int4_gives_what_the_reference_gives(kv_dtype):
    """A prompt of several blocks, then steps, one of which encodes a block; one row shorter than the exact tokens."""
    model, _ = on_device("Gemma 2", layer_types=["sliding_attention", "full_attention"])
    model.set_attn_implementation(NAME)
    device = model.device
    inputs = {name: tensor.to(device) for name, tensor in prompts(30, 125).items()}
    steps = [torch.tensor([[token], [token + 7]], device=device) for token in (11, 12, 13, 14)]
    logits, held = {}, {}
    for backend in ("reference", "triton"):
        cache = PagedCache(model.config, block_size=32, backend=backend, kv_dtype=kv_dtype, exact_layers=(0,))
        mask, found = inputs["attention_mask"], []
        found.append(model(**inputs, past_key_values=cache).logits[:, -1])
        for step in steps:
            mask = torch.cat([mask, torch.ones_like(step)], 1)
            found.append(model(step, attention_mask=mask, past_key_values=cache).logits[:, -1])
        logits[backend], held[backend] = torch.stack(found), cache
    torch.testing.assert_close(logits["triton"], logits["reference"], atol=6e-2, rtol=6e-2)
    if cache.sequences.tail is not None:
        assert cache.sequences.tail.sealed == [0, 64]
        reference, triton = (held[backend].layers[1] for backend in ("reference", "triton"))
        blocks = triton.table.rows[1][:2]
        # The first block's codes come from the model's first layers, whose keys agree but for rounding.
        kept, made = (decode_keys(layer.kv().k_pool, layer.kv().k_scale)[blocks] for layer in (reference, triton))
        assert (kept - made).abs().mean() < 0.02 * kept.abs().mean()
