"""The storage formats: what a key or value is stored as, and what that costs.

Keys and values may be stored in different formats. `int8` and `fp8` keep one float32 scale a token and KV head. A key's
scale then multiplies its column of scores, a value's its column of probabilities: readers never rescale a tile.

Their keys are *turned* first, and queries with them, so that q·k is unchanged: each channel of a KV head is divided by
a factor, and a Hadamard matrix then mixes the channels (kernels/rotate.py). A few channels of trained models' keys are
ten or a hundred times the others, and would take all the resolution of a scale that the whole head shares. The factor
is a power, `EVENNESS`, of the channel's largest magnitude: that share of the imbalance goes to the queries, which are
not quantised (SmoothQuant, arXiv:2211.10438, eq. 4), and the matrix spreads the rest (QuaRot, arXiv:2404.00456).

`int4` (kernels/int4.py) gives each channel of the keys a scale and a zero point over 32 tokens, so that outlier
channels cost nothing and keys need no turning. A group of keys can be encoded once all its tokens are there: the
newest, unfinished block of a sequence is kept as it arrived (cache/tail.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.int4 import GROUP, value_groups


@dataclass(frozen=True)
class Format:
    """How keys, or values, are stored."""

    name: str
    dtype: torch.dtype | None  # None: as they arrive
    scaled: bool = False  # one float32 scale a token and head
    turns_keys: bool = False
    packed: bool = False  # two elements a byte; a float16 scale and zero point a group

    def storage_dtype(self, arriving: torch.dtype) -> torch.dtype:
        return self.dtype or arriving

    def row(self, dim: int) -> int:
        """Elements of the storage dtype that a vector of `dim` channels takes."""
        return dim // 2 if self.packed else dim


@dataclass(frozen=True)
class CacheFormat:
    """How one layer of a cache stores keys and values."""

    key: Format
    value: Format

    @property
    def name(self) -> str | tuple[str, str]:
        return self.key.name if self.key is self.value else (self.key.name, self.value.name)

    @property
    def needs_tail(self) -> bool:
        """Whether the newest tokens wait, as they arrived, until their block is full: keys come in groups of tokens."""
        return self.key.packed

    @property
    def block_size(self) -> int:
        """Tokens a block where nobody says: the kernels' tile, so that each is read from one place."""
        return 128 if self.key.scaled and self.value.scaled else 64

    def bytes_per_head(self, key_dim: int, value_dim: int, arriving: torch.dtype) -> int:
        """Bytes of one token's key and value in one KV head, scales and zero points included."""
        total = 0
        for format, dim in ((self.key, key_dim), (self.value, value_dim)):
            total += format.row(dim) * format.storage_dtype(arriving).itemsize + (4 if format.scaled else 0)
        if self.key.packed:
            total += 2 * 2 * key_dim // GROUP
        if self.value.packed:
            total += 2 * 2 * value_groups(value_dim)
        return total


FORMATS = {
    "auto": Format("auto", None),
    "bf16": Format("bf16", torch.bfloat16),
    "fp16": Format("fp16", torch.float16),
    "int8": Format("int8", torch.int8, scaled=True, turns_keys=True),
    "fp8": Format("fp8", torch.float8_e4m3fn, scaled=True, turns_keys=True),
    "int4": Format("int4", torch.uint8, packed=True),
}
AS_THEY_ARRIVE = CacheFormat(FORMATS["auto"], FORMATS["auto"])


def get_format(kv_dtype: Any) -> CacheFormat:
    """The format named `kv_dtype`: one name, or a pair of names, the keys' and the values'.

    Raises `ValueError`, listing the names, if there is no such format.
    """
    names = kv_dtype if isinstance(kv_dtype, (tuple, list)) else (kv_dtype, kv_dtype)
    if len(names) != 2 or not all(isinstance(name, str) and name in FORMATS for name in names):
        raise ValueError(
            f"kv_dtype={kv_dtype!r} is not a cache format. Use one of {', '.join(map(repr, FORMATS))}, or a pair of "
            "them, (keys, values)."
        )
    return CacheFormat(*(FORMATS[name] for name in names))


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
    return torch.where(amax > 0, factor, 1.0)
