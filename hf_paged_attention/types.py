"""What passes between the attention function, the cache and the backends: a batch, a layer's pages, a computation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class TailBatch:
    """Where a batch's newest tokens lie that are not encoded yet, and which blocks the pass encodes ("seals").

    Request r's positions before `sealed_lens[r]`, a multiple of the block size, are in the layer's pools, the others in
    the tail's.
    """

    sealed_lens: torch.Tensor  # int32 [R], after the pass
    block_table: torch.Tensor  # int32 [R, max_blocks], aligned with the batch's; entries of sealed blocks are not read
    slot_mapping: (
        torch.Tensor | None
    )  # int64 [N] in the tail, negative for tokens that are sealed at once; None: all are
    # Block `seal_blocks[m]` of request `seal_requests[m]` is to be sealed, int32 [M]; -1: nothing is.
    seal_requests: torch.Tensor
    seal_blocks: torch.Tensor
    # The same on the host: sealed tokens, and each request's blocks.
    host_sealed: list[int] = field(default_factory=list)
    host_blocks: list[list[int]] | None = None


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
    tail: TailBatch | None = None  # for layers whose `PagedKV` has a tail


@dataclass(frozen=True)
class PagedKV:
    """What a backend reads and writes: logical `[num_blocks, block_size, Hkv, D]`, any strides.

    A uint8 pool holds int4, `[num_blocks, block_size, Hkv, D / 2]`, as in kernels/int4.py.
    """

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    # 8 bits: float32 [num_blocks, block_size, Hkv]. int4: float16 [num_blocks, block_size / 32, Hkv, 2, D] for keys,
    # [num_blocks, block_size, Hkv, 2, groups] for values.
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    # float32 [Hkv, D]: keys are stored as (k / factor) H and queries become (q · factor) H, as in kernels/rotate.py.
    turn_factor: torch.Tensor | None = None
    # Where keys are int4: pools of another block table, with the tokens that are not encoded yet.
    tail: PagedKV | None = None

    @cached_property
    def met(self) -> PagedKV:
        """These pages for queries that are turned already."""
        return replace(self, turn_factor=None)

    @property
    def value_dim(self) -> int:
        return self.v_pool.shape[-1] * (2 if self.v_pool.dtype == torch.uint8 else 1)


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
