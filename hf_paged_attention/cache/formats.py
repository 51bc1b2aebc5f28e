"""The storage formats: what a key or value is stored as, and what that costs.

`int8` and `fp8` keep one float32 scale a token and KV head, for keys and for values. A key's scale then multiplies
its column of scores, a value's its column of probabilities: readers never rescale a tile.

Their keys are *turned* first, and queries with them, so that q·k is unchanged: each channel of a KV head is divided by
a factor, and a Hadamard matrix then mixes the channels (kernels/rotate.py). A few channels of trained models' keys are
ten or a hundred times the others, and would take all the resolution of a scale that the whole head shares. The factor
is a power, `EVENNESS`, of the channel's largest magnitude: that share of the imbalance goes to the queries, which are
not quantised (SmoothQuant, arXiv:2211.10438, eq. 4), and the matrix spreads the rest (QuaRot, arXiv:2404.00456).
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
    turns_keys: bool = False

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
    "int8": Format("int8", torch.int8, scaled=True, turns_keys=True),
    "fp8": Format("fp8", torch.float8_e4m3fn, scaled=True, turns_keys=True),
}


def get_format(kv_dtype: str) -> Format:
    """The format named `kv_dtype`; a `ValueError` that lists the names if there is none."""
    if kv_dtype not in FORMATS:
        raise ValueError(f"kv_dtype={kv_dtype!r} is not a cache format. Use one of {', '.join(map(repr, FORMATS))}.")
    return FORMATS[kv_dtype]


# Below this share of the head's mean magnitude a channel's factor is not lowered further: a channel that was all but
# silent in the first tokens may speak later, and its values are then divided by the factor.
QUIETEST = 1 / 32
# How much of the imbalance of channels the factor takes. Mean KL of SmolLM2, the same with key outliers × 30, and
# Gemma 3 270M over 1,024 tokens of WikiText-2, fed 128 at a time: int8 at 1/2 2.1e-4, 3.1e-4, 4.2e-4, at 3/4 2.5e-4,
# 2.6e-4, 4.4e-4, at 1 3.2e-4, 3.1e-4, 7.4e-4; fp8 at 1/2 3.3e-3, 7.2e-3, 6.0e-3, at 3/4 4.2e-3, 4.3e-3, 4.4e-3, at 1
# 6.2e-3, 5.5e-3, 9.1e-3.
EVENNESS = 3 / 4


def turn_factor(channel_amax: torch.Tensor) -> torch.Tensor:
    """float32 `[Hkv, D]` factor from the largest key magnitude a (head, channel), `[Hkv, D]`, seen so far.

    A power of two, so that multiplying and dividing by it is exact in every floating-point format.
    """
    amax = channel_amax.float()
    amax = torch.maximum(amax, amax.mean(-1, keepdim=True) * QUIETEST)
    factor = torch.exp2((torch.log2(amax) * EVENNESS).round())
    return torch.where(amax > 0, factor, torch.ones_like(factor))
