"""Pools as matrices that the GPU's copy engine (TMA, Hopper on) reads a tile of per instruction.

A row is a slot of one head, [rows, D], or for values transposed in their page a channel of one head's block,
[rows, block_size]. Head h, block b starts at row h * rows_a_head + b * rows_a_block. A pool laid out otherwise, or too
large for 32-bit rows, has no such matrix: kernels then read it through pointers.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16  # bytes, of addresses, rows and tiles


@dataclass(frozen=True)
class _Geometry:
    """What of a `PoolMatrix` follows from the pool's shape and strides."""

    shape: list[int]
    strides: list[int]
    tile: list[int]
    rows_a_head: int
    rows_a_block: int


class PoolMatrix:
    def __init__(self, pool: torch.Tensor, geometry: _Geometry):
        self.pool = pool
        self.shape, self.strides = geometry.shape, geometry.strides
        self.rows_a_head, self.rows_a_block = geometry.rows_a_head, geometry.rows_a_block
        self._tile = geometry.tile

    @property
    def descriptor(self) -> TensorDescriptor:
        return TensorDescriptor(self.pool, self.shape, self.strides, self._tile)


def pool_matrix(pool: torch.Tensor, *, keys: int, channels: int) -> PoolMatrix | None:
    """The matrix of a pool [num_blocks, block_size, Hkv, D], read in tiles of `keys` slots and `channels` channels.

    None where the layout has none, or where a tile would not lie in one page.
    """
    if pool.data_ptr() % _ALIGNMENT:
        return None
    geometry = _geometry(pool.shape, pool.stride(), pool.element_size(), keys, channels)
    return None if geometry is None else PoolMatrix(pool, geometry)


@lru_cache(maxsize=1024)
def _geometry(shape: tuple[int, ...], stride: tuple[int, ...], size: int, keys: int, channels: int) -> _Geometry | None:
    num_blocks, block_size, heads, dim = shape
    block, slot, head, channel = stride
    transposed = slot == 1
    row = channel if transposed else slot
    width, tile = (block_size, (channels, keys)) if transposed else (dim, (keys, channels))
    fits = (
        num_blocks > 0
        and (transposed or channel == 1)
        and block_size % keys == 0
        and row > 0
        and block % row == 0
        and head % row == 0
        and row * size % _ALIGNMENT == 0
        and row >= width
        and tile[1] * size >= _ALIGNMENT
        and max(tile) <= 256
    )
    if not fits:
        return None
    rows = ((heads - 1) * head + (num_blocks - 1) * block) // row + (dim if transposed else block_size)
    if rows >= 2**31:
        return None
    return _Geometry([rows, width], [row, 1], list(tile), head // row, block // row)
