"""Launch choices: given shapes, lengths and the GPU, the tile, warps, stages and splits of each kernel.

Pure functions of their arguments, so that a plan can be tested and printed; nothing is timed in a user's process.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from .checks import AttentionShape


@dataclass(frozen=True)
class Gpu:
    """What plans see: a class ("hopper", "ada", "ampere", "other", "cpu"), SMs, and shared memory a block (bytes)."""

    kind: str
    sms: int
    shared_memory: int


CPU = Gpu("cpu", 4, 1 << 20)


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a device; the interpreter's tiles on a CPU."""
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    kinds = {(8, 0): "ampere", (8, 6): "ada", (8, 9): "ada", (9, 0): "hopper"}
    kind = kinds.get((properties.major, properties.minor), "other")
    return Gpu(kind, properties.multi_processor_count, properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class UnifiedPlan:
    """block_m rows (tokens x group) and block_n keys a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodePlan:
    """block_n keys a tile; about `programs` splits a KV head over all requests, of at least `min_tiles` tiles each.

    merge_splits partial outputs are merged at a time.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_tiles: int
    merge_splits: int = 8


@dataclass(frozen=True)
class WritePlan:
    """block_rows (token, head) rows a program."""

    block_rows: int
    num_warps: int


def tile_bytes(block_m: int, block_n: int, stages: int, shape: AttentionShape) -> int:
    """Shared memory of a tile: the query, and K and V for each stage; 8-bit tiles are converted to the query's type."""
    d = triton.next_power_of_2(shape.head_dim)
    dv = triton.next_power_of_2(shape.value_dim)
    converted = shape.query_dtype.itemsize if shape.pool_dtype.itemsize != shape.query_dtype.itemsize else 0
    key = stages * shape.pool_dtype.itemsize + converted
    return block_m * d * shape.query_dtype.itemsize + block_n * (d + dv) * key


def plan_unified(
    shape: AttentionShape, *, max_query_len: int, max_seq_len: int, window: int | None = None, gpu: Gpu | None = None
) -> UnifiedPlan:
    """The tile of `unified_attention`: as many rows as the batch fills, as many keys as shared memory holds."""
    gpu = gpu or gpu_of(shape.device)
    group_rows = triton.next_power_of_2(shape.group)
    rows = max(16, group_rows, min(128, triton.next_power_of_2(max_query_len * shape.group)))
    wide = max(shape.head_dim, shape.value_dim) > 128
    stages = 2
    block_n = 64
    while tile_bytes(rows, block_n, stages, shape) > gpu.shared_memory:
        if block_n > 16:
            block_n //= 2
        elif rows > max(16, group_rows):
            rows //= 2
        else:
            stages = 1
            break
    return UnifiedPlan(rows, block_n, 8 if wide and rows >= 64 else 4, stages)


def plan_decode(
    shape: AttentionShape, *, max_seq_len: int, window: int | None = None, gpu: Gpu | None = None
) -> DecodePlan:
    """The tile and splits of `decode_attention`: enough splits to fill every SM, none shorter than two tiles."""
    gpu = gpu or gpu_of(shape.device)
    rows = max(16, triton.next_power_of_2(shape.group))
    stages = 3
    block_n = 64
    while tile_bytes(rows, block_n, stages, shape) > gpu.shared_memory // 2:
        if stages > 2:
            stages -= 1
        elif block_n > 16:
            block_n //= 2
        else:
            stages = 1
            break
    programs = max(1, triton.cdiv(4 * gpu.sms, shape.kv_heads))
    return DecodePlan(block_n, 4, stages, programs, 2)


def plan_write(*, rows: int, head_dim: int, itemsize: int, device: torch.device, gpu: Gpu | None = None) -> WritePlan:
    """Rows a program of `write_kv`: few when rows are few, so that they spread over the SMs."""
    gpu = gpu or gpu_of(device)
    if gpu.kind == "cpu":
        return WritePlan(64, 4)
    block_rows = 4 if rows <= 16 * gpu.sms else 16
    return WritePlan(block_rows, 4 if block_rows > 4 else 1)
