"""What passes between the attention function, the cache and the backends: a batch, a layer's pages, a computation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class BatchMetadata:
    """What every backend is told of a flattened batch of N query tokens from R requests.

    Queries are the newest positions of their request: token t of request r is at `seq_lens[r] - q_len[r] + t`.
    """

    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R], the new tokens included
    block_table: torch.Tensor  # int32 [R, max_blocks]
    slot_mapping: torch.Tensor | None  # int64 [N]; None where the keys lie in memory of another cache
    max_query_len: int
    max_seq_len: int
    block_size: int
    kv_start: torch.Tensor | None = None  # int32 [R]: keys before it are padding (other caches only)
    # The same on the host, for backends that run there: query and sequence lengths, and each request's blocks.
    query_lens: list[int] = field(default_factory=list)
    host_seq_lens: list[int] = field(default_factory=list)
    host_blocks: list[list[int]] | None = None
    host_kv_start: list[int] | None = None


@dataclass(frozen=True)
class PagedKV:
    """What a backend reads and writes: logical `[num_blocks, block_size, Hkv, D]`, any strides."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    k_scale: torch.Tensor | None = None  # float32 [num_blocks, block_size, Hkv]
    v_scale: torch.Tensor | None = None
    # float32 [Hkv, D]: keys are stored as (k / factor) H and queries become (q · factor) H, as in kernels/rotate.py.
    turn_factor: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention computes, the same for every backend.

    scale multiplies q·k; `window` is the number of keys a query sees, itself included (None: all); softcap c turns a
    scaled score s into c·tanh(s / c); sinks `[Hq]` are extra logits of the softmax that have no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
