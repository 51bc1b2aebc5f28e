"""One layer's decode step as a single operator, so that `torch.compile` sees neither the cache nor the kernels.

Writes the new token's key and value into their slots and attends over the pages. The pools are declared as mutated,
which is what keeps Inductor from copying or reordering them.
"""

from __future__ import annotations

import torch

from .backends import select
from .cache.storage import views
from .cache.writing import write_beside
from .types import AttentionSpec, BatchMetadata, TailBatch


@torch.library.custom_op(
    "hf_paged_attention::decode_step",
    mutates_args=("k_memory", "v_memory", "k_scale", "v_scale", "k_tail", "v_tail"),
)
def decode_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_memory: torch.Tensor,
    v_memory: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    turn_factor: torch.Tensor | None,
    k_tail: torch.Tensor | None,
    v_tail: torch.Tensor | None,
    sinks: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    sealed_lens: torch.Tensor | None,
    tail_table: torch.Tensor | None,
    tail_slots: torch.Tensor | None,
    seal_requests: torch.Tensor | None,
    seal_blocks: torch.Tensor | None,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> torch.Tensor:
    """Attention of query `[B, Hq, 1, D]`: `[B, 1, Hq, Dv]`. `*_memory` as in `Storage.memory`."""

    kv = views((k_memory, v_memory, k_scale, v_scale, turn_factor, k_tail, v_tail))
    spec = AttentionSpec(scale, window, softcap, sinks)
    rows = query.shape[0]
    on_host = query.device.type == "cpu"
    tail = None
    if kv.tail is not None:
        host_sealed = sealed_lens.tolist() if on_host else []
        tail = TailBatch(sealed_lens, tail_table, tail_slots, seal_requests, seal_blocks, host_sealed)
    batch = BatchMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=slots,
        max_query_len=1,
        max_seq_len=block_table.shape[1] * block_size,
        block_size=block_size,
        query_lens=[1] * rows,
        host_seq_lens=seq_lens.tolist() if on_host else [],
        tail=tail,
    )
    chosen = select(query, kv, spec, backend)
    query, key, value = query.squeeze(2), key.squeeze(2), value.squeeze(2)
    if tail is None:
        query, kv = write_beside(chosen, query, key, value, kv, slots)
    else:
        chosen.write(key, value, kv.tail, tail_slots)
        chosen.seal(key, value, kv, batch)
    return chosen.attend(query, kv, batch, spec).unsqueeze(1)


@decode_step.register_fake
def _(query, key, value, *arguments):
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])
