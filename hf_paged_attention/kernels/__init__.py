"""Attention from pages: Triton kernels, each with its PyTorch reference. Knows tensors, no models and no caches."""

from .decode import decode_attention
from .merge import merge_splits
from .reference import (
    decode_keys,
    decode_values,
    quantize,
    reference_attention,
    reference_merge_splits,
    reference_write_kv,
)
from .rotate import hadamard_block, hadamard_signs, reference_rotate_heads, rotate_heads, unrotate_heads
from .seal import reference_seal_kv, seal_kv
from .unified import unified_attention
from .write import write_kv

__all__ = [
    "decode_attention",
    "decode_keys",
    "decode_values",
    "hadamard_block",
    "hadamard_signs",
    "merge_splits",
    "quantize",
    "reference_attention",
    "reference_merge_splits",
    "reference_rotate_heads",
    "reference_seal_kv",
    "reference_write_kv",
    "rotate_heads",
    "seal_kv",
    "unified_attention",
    "unrotate_heads",
    "write_kv",
]
