"""The storage formats: what a key or value is stored as, and what that costs.

`int8` and `fp8` keep one float32 scale a token and KV head, for keys and for values. A key's scale then multiplies
its column of scores, a value's its column of probabilities: readers never rescale a tile.

`int8` keys are *balanced* first: divided by one factor a (KV head, channel), and queries multiplied by it, so that
q·k is unchanged. A few channels of trained models' keys are ten or a hundred times the others, and would take all the
resolution of a scale that the whole head shares (SmoothQuant, arXiv:2211.10438, eq. 4 with alpha = 1, applied to
q·k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """How one cache stores keys and values."""

    name: str
    dtype: torch.dtype | None  # None: as they arrive
    scaled: bool = False
    balances_keys: bool = False

    def storage_dtype(self, arriving: torch.dtype) -> torch.dtype:
        return self.dtype or arriving

    def bytes_per_head(self, key_dim: int, value_dim: int, arriving: torch.dtype) -> int:
        """Bytes of one token's key and value in one KV head, scales included."""
        item = torch.empty(0, dtype=self.storage_dtype(arriving)).element_size()
        return (key_dim + value_dim) * item + (2 * 4 if self.scaled else 0)


FORMATS = {
    "auto": Format("auto", None),
    "bf16": Format("bf16", torch.bfloat16),
    "fp16": Format("fp16", torch.float16),
    "int8": Format("int8", torch.int8, scaled=True, balances_keys=True),
    "fp8": Format("fp8", torch.float8_e4m3fn, scaled=True),
}


def get_format(kv_dtype: str) -> Format:
    """The format named `kv_dtype`; a `ValueError` that lists the names if there is none."""
    if kv_dtype not in FORMATS:
        raise ValueError(f"kv_dtype={kv_dtype!r} is not a cache format. Use one of {', '.join(map(repr, FORMATS))}.")
    return FORMATS[kv_dtype]


# Below this share of the head's mean magnitude a channel's factor is not lowered further: a channel that was all but
# silent in the first tokens may speak later, and its values are then divided by the factor.
QUIETEST = 1 / 32


def balance_factor(channel_amax: torch.Tensor) -> torch.Tensor:
    """float32 `[Hkv, D]` factor from the largest key magnitude a (head, channel), `[Hkv, D]`, seen so far."""
    amax = channel_amax.float()
    floor = amax.mean(-1, keepdim=True) * QUIETEST
    factor = torch.maximum(amax, floor)
    return torch.where(factor > 0, factor, torch.ones_like(factor))


def encode(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric encoding of `[..., D]` with one scale a vector: (encoded `[..., D]`, float32 scales `[...]`)."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = values.float().abs().amax(-1) / largest
    unit = values.float() / torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(-1)
    return (unit.round() if dtype == torch.int8 else unit).clamp(-largest, largest).to(dtype), scale
