"""The tensors of one layer: pools of keys and values, their scales, the keys' turn factor, and the tail.

In memory a pool is head-outermost, `[Hkv, num_blocks, block_size, D]`: a head's block is one contiguous piece, and
blocks that follow one another can be read as one. 8-bit values on a GPU lie transposed in their block, `[Hkv,
num_blocks, D, block_size]`: a decode kernel can then multiply the bytes as they are. Readers of the code see
`[num_blocks, block_size, Hkv, D]`, through strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..kernels import decode_keys, decode_values
from ..kernels.int4 import GROUP, value_groups
from ..types import PagedKV
from .formats import CacheFormat, Format, turn_factor

# Pools grow by this share at least, so that a long generation copies each token a bounded number of times.
GROWTH = 1 / 8
# Pools of so few blocks are not worth shrinking.
FEW_BLOCKS = 64
# Factors are fitted anew, and what is stored encoded anew, until this many tokens were seen.
TOKENS_TO_FIT = 64


Memory = tuple["torch.Tensor | None", ...]
Page = tuple[Any, ...]  # dtype and sizes of one head's block


def values_by_slot(value: Format, device: torch.device) -> bool:
    """Whether values lie transposed in their block."""
    return value.scaled and device.type == "cuda"


def views(memory: Memory) -> PagedKV:
    """What backends see of (keys, values, key scales, value scales, turn factor, tail keys, tail values) as they lie in
    memory."""
    keys, values, key_scales, value_scales, factor, tail_keys, tail_values = memory
    # Only 8-bit values have one scale a slot.
    by_slot = value_scales is not None and value_scales.dim() == 3 and values.device.type == "cuda"
    return PagedKV(
        keys.movedim(0, 2),
        values.permute(1, 3, 0, 2) if by_slot else values.movedim(0, 2),
        None if key_scales is None else key_scales.movedim(0, 2),
        None if value_scales is None else value_scales.movedim(0, 2),
        factor,
        None if tail_keys is None else PagedKV(tail_keys.movedim(0, 2), tail_values.movedim(0, 2)),
    )


class Storage:
    """Grows with its block pool; the first keys say shape, dtype and device, and memory is taken as blocks are."""

    def __init__(
        self, format: CacheFormat, block_size: int, key: torch.Tensor, value: torch.Tensor, lent: Memory | None = None
    ):
        """key `[B, Hkv, T, D]` and value `[B, Hkv, T, Dv]` give shapes, dtype and device only.

        lent: the memory of a cache that is gone, to begin with where it fits; ignored where it does not.
        Raises `ValueError` for int4 and an odd head size.
        """
        self.format = format
        self.block_size = block_size
        self.num_heads, self.key_dim, self.value_dim = key.shape[1], key.shape[-1], value.shape[-1]
        self.arriving = key.dtype
        self.device = key.device
        self.num_blocks = 0
        self._kv: PagedKV | None = None
        for what, side, dim in (("keys", format.key, self.key_dim), ("values", format.value, self.value_dim)):
            if side.packed and dim % 2:
                raise ValueError(
                    f"kv_dtype={format.name!r} packs two channels a byte, but the {what} have head size {dim}. Use "
                    "kv_dtype='int8'."
                )
        # None before the first block, and what the format has not for good.
        self._k = self._v = self._k_scale = self._v_scale = None
        self._pages = self._pages_of(format)
        # The newest tokens, in another block table's blocks.
        self._tail_pages: list[Page | None] = [None, None]
        if format.needs_tail:
            self._tail_pages = [(self.arriving, block_size, self.key_dim), (value.dtype, block_size, self.value_dim)]
        self._k_tail, self._v_tail = self._allocated(self._tail_pages, 0) if format.needs_tail else (None, None)
        self.channel_amax: torch.Tensor | None = None
        self.turn_factor: torch.Tensor | None = None
        self.tokens_fitted = 0
        # The factor's place in memory, which a captured step has kept: later factors are written there.
        self._factor_memory: torch.Tensor | None = None
        self.keeps_memory = False  # a captured step has kept the pools' addresses: do not shrink them
        if lent is not None:
            self._take(lent)

    def _pages_of(self, format: CacheFormat) -> list[Page | None]:
        """Of keys, values, key scales and value scales; None for what the format has not."""
        size = self.block_size
        values = (size, format.value.row(self.value_dim))
        if values_by_slot(format.value, self.device):
            values = values[::-1]
        k_scale = v_scale = None
        if format.key.packed:
            k_scale = (torch.float16, size // GROUP, 2, self.key_dim)
        elif format.key.scaled:
            k_scale = (torch.float32, size)
        if format.value.packed:
            v_scale = (torch.float16, size, 2, value_groups(self.value_dim))
        elif format.value.scaled:
            v_scale = (torch.float32, size)
        keys = (format.key.storage_dtype(self.arriving), size, format.key.row(self.key_dim))
        return [keys, (format.value.storage_dtype(self.arriving), *values), k_scale, v_scale]

    def _allocated(self, pages: list[Page | None], num_blocks: int) -> list[torch.Tensor | None]:
        # Normal tensors under torch.inference_mode() too: what that mode allocates cannot be written outside of it, and
        # a cache outlives a call.
        with torch.inference_mode(False):
            return [
                None
                if page is None
                else torch.empty(self.num_heads, num_blocks, *page[1:], dtype=page[0], device=self.device)
                for page in pages
            ]

    def _take(self, lent: Memory) -> None:
        *pools, factor, tail_keys, tail_values = lent
        for page, memory in zip(self._pages + self._tail_pages, (*pools, tail_keys, tail_values), strict=True):
            held = None if memory is None else (memory.dtype, *memory.shape[2:])
            if held != page or (
                memory is not None and (memory.device != self.device or memory.shape[0] != self.num_heads)
            ):
                return
        self._pools, self._k_tail, self._v_tail = pools, tail_keys, tail_values
        self._factor_memory = factor
        self.num_blocks = self._k.shape[1]
        self.keeps_memory = True

    @property
    def _pools(self) -> Memory:
        return self._k, self._v, self._k_scale, self._v_scale

    @_pools.setter
    def _pools(self, pools: Iterable[torch.Tensor | None]) -> None:
        self._k, self._v, self._k_scale, self._v_scale = pools

    @property
    def bytes(self) -> int:
        """Bytes that the tensors take, blocks in use or not, the tail included."""
        return sum(tensor.nbytes for tensor in (*self._pools, self._k_tail, self._v_tail) if tensor is not None)

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.format.bytes_per_head(self.key_dim, self.value_dim, self.arriving)

    @property
    def tail_bytes_per_token(self) -> int:
        """Bytes of a token in the tail."""
        if self._k_tail is None:
            return 0
        return self.num_heads * (self.key_dim * self._k_tail.itemsize + self.value_dim * self._v_tail.itemsize)

    def __getstate__(self) -> dict[str, Any]:
        # Views are copied apart from what they are views of: made again where they are asked for.
        return {**self.__dict__, "_kv": None}

    def kv(self) -> PagedKV:
        """The pools of the moment; the same object until one of them is replaced."""
        if self._kv is None:
            with torch.inference_mode(False):
                self._kv = views(self.memory())
        return self._kv

    def memory(self) -> Memory:
        """Keys, values, their scales, the keys' factor and the tail as they lie in memory, head-outermost."""
        if self._k is None:
            self._pools = self._allocated(self._pages, 0)
        return *self._pools, self.turn_factor, self._k_tail, self._v_tail

    def ensure(self, num_blocks: int, limit: int | None, expected: Callable[[], int | None] = lambda: None) -> None:
        """Room for `num_blocks` blocks; what is stored in them stays. `limit`: blocks that will never be exceeded.

        expected: how many blocks there will be, where that is known. A pool that begins with nearly as many has room
        for them at once, and one that grows has none beyond them, unless it `keeps_memory`, for longer calls to come.
        Room for more than twice as many is given back, unless `keeps_memory`: a sliding layer holds a long prompt only
        until it is read.
        """
        if num_blocks <= self.num_blocks and (self.keeps_memory or self.num_blocks <= max(2 * num_blocks, FEW_BLOCKS)):
            return
        target, last = num_blocks, expected()
        if num_blocks > self.num_blocks > 0:
            target = int(self.num_blocks * (1 + GROWTH)) + 1
            if last is not None and not self.keeps_memory:
                target = min(target, last)
        elif self.num_blocks == 0 and last is not None and last <= num_blocks * (1 + GROWTH):
            target = last
        if limit is not None:
            target = min(target, limit)
        target = max(num_blocks, target)

        self._kv = None
        if self.num_blocks:
            # One tensor at a time, so that only one is in memory twice.
            self._k = _resized(self._k, target)
            self._v = _resized(self._v, target)
            self._k_scale, self._v_scale = _resized(self._k_scale, target), _resized(self._v_scale, target)
        else:
            self._pools = self._allocated(self._pages, target)
        self.num_blocks = target

    def ensure_tail(self, num_blocks: int) -> None:
        """Room for `num_blocks` blocks of the tail: about one a sequence, so none is ever given back."""
        if self._k_tail is None or num_blocks <= self._k_tail.shape[1]:
            return
        self._k_tail, self._v_tail = _resized(self._k_tail, num_blocks), _resized(self._v_tail, num_blocks)
        self._kv = None

    def serve_any_size(self) -> None:
        """Tell the compiler that pools have any size: a compiled decode step must serve the next cache's too."""
        for memory in (*self._pools, self._k_tail, self._v_tail):
            if memory is not None:
                torch._dynamo.maybe_mark_dynamic(memory, 1)

    def unseal(self, sources: list[int], destinations: list[int]) -> None:
        """Decode the blocks `sources` into the tail's blocks `destinations`."""
        kv = self.kv()
        kv.tail.k_pool[destinations] = decode_keys(_picked(kv.k_pool, sources), kv.k_scale[sources]).to(self.arriving)
        values = decode_values(_picked(kv.v_pool, sources), None if kv.v_scale is None else kv.v_scale[sources])
        kv.tail.v_pool[destinations] = values.to(kv.tail.v_pool.dtype)

    def copy_tail_blocks(self, sources: list[int], destinations: list[int]) -> None:
        for memory in (self._k_tail, self._v_tail):
            memory[:, destinations] = memory[:, sources]

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        for memory in self._pools:
            if memory is not None:
                raw = memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
                raw[:, destinations] = raw[:, sources]

    # Turning the keys
    # -----------------------------------------------------------------------------------------------------------

    def forget_fit(self) -> None:
        self._kv = self.channel_amax = self.turn_factor = None
        self.tokens_fitted = 0

    @property
    def is_fitted(self) -> bool:
        return not self.format.key.turns_keys or self.tokens_fitted >= TOKENS_TO_FIT

    @torch.inference_mode(False)
    def fit(self, key: torch.Tensor) -> torch.Tensor | None:
        """Let new keys `[N, Hkv, D]` widen the factor.

        Returns the factor that the keys stored so far were divided by if they must be encoded anew, else None. That
        happens when the number of tokens seen reaches a power of two: each time adds a rounding to what is stored.
        """
        before, self.tokens_fitted = self.tokens_fitted, self.tokens_fitted + key.shape[0]
        amax = key.detach().abs().amax(0).float()
        self.channel_amax = amax if self.channel_amax is None else torch.maximum(self.channel_amax, amax)
        if before.bit_length() == self.tokens_fitted.bit_length():
            return None
        previous, factor = self.turn_factor, turn_factor(self.channel_amax)
        if self._factor_memory is None:
            self._factor_memory = factor
        else:
            previous = None if previous is None else previous.clone()
            self._factor_memory.copy_(factor)
        self.turn_factor = self._factor_memory
        self._kv = None
        return previous


@torch.inference_mode(False)
def _resized(memory: torch.Tensor | None, num_blocks: int) -> torch.Tensor | None:
    if memory is None:
        return None
    shape = list(memory.shape)
    kept, shape[1] = min(shape[1], num_blocks), num_blocks
    other = memory.new_empty(shape)
    other[:, :kept].copy_(memory[:, :kept])
    return other


def _picked(pool: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """The blocks of a pool; float8 cannot be indexed everywhere, bytes can."""
    return pool.view(torch.uint8)[blocks].view(pool.dtype) if pool.dtype.itemsize == 1 else pool[blocks]
