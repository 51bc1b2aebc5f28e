"""Attention from pages: Triton kernels, each with its PyTorch reference. Knows tensors, no models and no caches."""

from .decode import decode_attention
from .merge import merge_splits
from .reference import reference_attention, reference_merge_splits, reference_write_kv
from .unified import unified_attention
from .write import write_kv

__all__ = [
    "decode_attention",
    "merge_splits",
    "reference_attention",
    "reference_merge_splits",
    "reference_write_kv",
    "unified_attention",
    "write_kv",
]
