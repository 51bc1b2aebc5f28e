"""Makes Transformers know `attn_implementation="paged_triton"`: the attention function and the mask function.

Both are needed: an implementation without a mask function is never told about padding.
"""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention import NAME, paged_attention
from .masks import paged_mask


def register() -> None:
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, paged_mask)
