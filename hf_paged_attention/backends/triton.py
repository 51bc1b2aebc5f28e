"""The Triton kernels as a backend."""

from __future__ import annotations

import os

import torch

from ..types import AttentionSpec, BatchMetadata, PagedKV

LARGEST_HEAD = 512


def interpreted() -> bool:
    """Whether Triton was asked to run its kernels on the CPU; it reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class TritonBackend:
    name = "triton"

    def why_not(self, device: torch.device) -> str | None:
        try:
            import triton  # noqa: F401
        except ImportError:
            return "the package triton is not installed"
        if device.type == "cuda":
            return None
        if device.type == "cpu" and interpreted():
            return None
        return f"no GPU: Triton does not compile for {device.type}; TRITON_INTERPRET=1 would run the kernels, slowly"

    def why_not_this(self, query: torch.Tensor, kv: PagedKV, spec: AttentionSpec) -> str | None:
        head_size = max(query.shape[-1], kv.value_dim)
        if head_size > LARGEST_HEAD:
            return f"head size {head_size} is larger than {LARGEST_HEAD}"
        if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"queries are {query.dtype}; it takes float32, bfloat16 and float16"
        return None

    def write(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
        self.write_turning(None, key, value, kv, slot_mapping)

    def write_turning(self, query, key, value, kv: PagedKV, slot_mapping: torch.Tensor) -> torch.Tensor:
        from ..kernels import write_kv

        return write_kv(
            key,
            value,
            kv.k_pool,
            kv.v_pool,
            slot_mapping,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            turn_factor=kv.turn_factor,
            query=query,
        )

    def seal(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, batch: BatchMetadata) -> None:
        from ..kernels import seal_kv

        seal_kv(
            key,
            value,
            kv.k_pool,
            kv.v_pool,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            k_tail=kv.tail.k_pool,
            v_tail=kv.tail.v_pool,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            tail_table=batch.tail.block_table,
            seal_requests=batch.tail.seal_requests,
            seal_blocks=batch.tail.seal_blocks,
        )

    def attend(self, query: torch.Tensor, kv: PagedKV, batch: BatchMetadata, spec: AttentionSpec) -> torch.Tensor:
        from ..kernels import decode_attention, rotate_heads, unified_attention

        arguments = {
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "block_table": batch.block_table,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
            "scale": spec.scale,
            "window": spec.window,
            "softcap": spec.softcap,
            "sinks": spec.sinks,
            "k_scale": kv.k_scale,
            "v_scale": kv.v_scale,
            "kv_start": batch.kv_start,
        }
        if kv.tail is not None:
            arguments |= {
                "k_tail": kv.tail.k_pool,
                "v_tail": kv.tail.v_pool,
                "tail_table": batch.tail.block_table,
                "sealed_lens": batch.tail.sealed_lens,
            }
        if kv.turn_factor is not None:
            # Another layer wrote these keys, else the queries would have been turned beside them.
            query = rotate_heads(query, kv.turn_factor, divide=False)
        if batch.max_query_len == 1 and query.shape[0] == batch.seq_lens.shape[0]:
            return decode_attention(query, kv.k_pool, kv.v_pool, **arguments)
        return unified_attention(query, kv.k_pool, kv.v_pool, **arguments)
