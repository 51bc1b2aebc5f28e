"""The mask function that Transformers asks for `attn_implementation="paged_triton"`.

Transformers describes the mask it wants by a function of indices. Ours is never n × n: causality and windows are
lengths to the kernels, so all that is left is which columns are padding. What cannot be said that way is refused
here, by name, before any token is computed: an implementation that ignored it would be wrong without a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .compat import (
    CACHE_ARGUMENT,
    computes_with_the_mask,
    describe_mask_function,
    runs_its_own_attention,
    slices_the_mask,
)


@dataclass(frozen=True)
class MaskInfo:
    """What the model asked for, carried by the padding mask that `paged_mask` returns."""

    window: int | None
    # One past the column of the newest query among the mask's columns; later columns hold nothing yet (StaticCache).
    kv_end: int


class PaddingMask(torch.Tensor):
    """A padding mask for models that cut queries off a mask `[batch, heads, queries, keys]`: ours has no queries."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __getitem__(self, index: Any) -> torch.Tensor:
        everything = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and index[0] == index[1] == index[3] == everything:
            return self
        return super().__getitem__(index)


def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Bool `[batch_size, kv_length]`, False for padding, with the `MaskInfo` in its attribute `paged_info`.

    A `PagedCache` makes `kv_length` the number of new tokens: the mask then speaks of those alone.

    Raises `NotImplementedError` for a pattern other than causal and sliding-window, `ValueError` for a mask too short.
    """
    config = kwargs.get("config")
    if torch.compiler.is_compiling():
        if q_length == kv_length == 1:
            return None  # a captured decode step of one real token a row; the model's prefill was looked at
        return _untraced(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            use_vmap,
            device,
            config=config,
        )
    if getattr(attention_mask, "paged_info", None) is not None:
        return attention_mask  # generate made it before the forward pass, for a cache of static shape
    if runs_its_own_attention(config):
        raise NotImplementedError(
            f"Models of type {config.model_type!r} run an attention of their own, in which "
            'attn_implementation="paged_triton" has no part. Use attn_implementation="eager" for them.'
        )
    if computes_with_the_mask(config):
        raise NotImplementedError(
            f"Models of type {config.model_type!r} compute with the attention mask itself, [batch, heads, queries, "
            'keys], which attn_implementation="paged_triton" never makes. Use attn_implementation="eager" for them.'
        )
    kind, window = describe_mask_function(mask_function)
    if kind not in ("causal", "sliding"):
        raise NotImplementedError(
            f"The mask {kind!r} that this model asks for is neither causal nor a causal sliding window, and "
            'attn_implementation="paged_triton" cannot express it. Use attn_implementation="sdpa" for this input.'
        )
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    kv_end = q_offset + q_length - kv_offset
    if attention_mask is None:
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        if attention_mask.shape[1] < kv_offset + min(kv_length, kv_end):
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, but {q_offset} tokens are cached and "
                f"{q_length} are new: it must have {q_offset + q_length}, the cached tokens included."
            )
        if q_length == 1 and kv_offset > 0:
            _refuse_padding_before(attention_mask, q_offset)
        # A copy, so that what is remembered about it is not remembered about the caller's tensor.
        mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool().clone()
    if slices_the_mask(config):
        mask = mask.as_subclass(PaddingMask)
    mask.paged_info = MaskInfo(window, kv_end)
    return mask


def _refuse_padding_before(attention_mask: torch.Tensor, column: int) -> None:
    """`ValueError` for a token in `column` behind padding of which a sliding cache no longer shows that it is a gap."""
    before = attention_mask[:, :column].bool()
    bad = before.any(1) & ~before[:, -1] & attention_mask[:, column].bool()
    if bad.any():
        raise ValueError(
            f"attention_mask has padding between real tokens in rows {bad.nonzero().flatten().tolist()}. Pad on the "
            "left."
        )


_untraced = torch.compiler.disable(lambda *arguments, **named: paged_mask(*arguments, **named))


@dataclass(frozen=True)
class Bounds:
    """Where the keys of each row of a contiguous cache begin and end."""

    starts: list[int] | None  # first column that is not padding; None when every row starts at 0
    end: int


def contiguous_bounds(mask: torch.Tensor | None, key_length: int, query_length: int) -> Bounds:
    """The bounds of keys `[B, Hkv, key_length, D]` under a 2D mask; worked out once a mask (it makes the host wait).

    Left padding is where a row starts. Right padding is allowed among the new tokens, whose causal mask hides it from
    the others; padding with real tokens on both sides is refused with `ValueError`: the keys lie in another cache's
    memory.
    """
    if mask is None:
        return Bounds(None, key_length)
    known = getattr(mask, "paged_bounds", None)
    if known is not None:
        return known
    info: MaskInfo | None = getattr(mask, "paged_info", None)
    end = key_length if info is None else min(info.kv_end, key_length)
    columns = mask[:, -key_length:][:, :end].bool().cpu()
    if columns.all():
        bounds = Bounds(None, end)
    else:
        empty = ~columns.any(1)
        starts = torch.where(empty, end, columns.int().argmax(1))
        last = end - columns.flip(1).int().argmax(1)  # one past the last real column
        begins = columns & ~torch.nn.functional.pad(columns[:, :-1], (1, 0))
        bad = (~empty & ((begins.sum(1) > 1) | (last < end - query_length))).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"attention_mask has padding between real tokens in rows {bad}. Keys in a cache other than PagedCache "
                f"cannot be skipped one by one: pad on the left, or pass {CACHE_ARGUMENT}=PagedCache(model.config)."
            )
        bounds = Bounds(starts.tolist() if starts.any() else None, end)
    mask.paged_bounds = bounds
    return bounds
