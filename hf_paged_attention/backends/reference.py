"""PyTorch on the same pages: what answers without a GPU, and what every other backend is compared with.

The semantics are those of `kernels.reference_attention`, written for speed: one `scaled_dot_product_attention` a
request over its own keys, the query heads of a group stacked as rows so that no key is repeated, and no copy at all
where a request's blocks follow one another in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..types import AttentionSpec, BatchMetadata, PagedKV

# Query tokens a call to scaled_dot_product_attention: bounds the mask, which is group · tokens · keys.
CHUNK = 512


class ReferenceBackend:
    name = "reference"

    def why_not(self, device: torch.device) -> str | None:
        return None

    def why_not_this(self, query: torch.Tensor, kv: PagedKV, spec: AttentionSpec) -> str | None:
        return None

    def write(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
        from ..kernels import reference_rotate_heads, reference_write_kv

        if kv.turn_factor is not None:
            key = reference_rotate_heads(key, kv.turn_factor, divide=True)
        reference_write_kv(
            key,
            value,
            kv.k_pool,
            kv.v_pool,
            slot_mapping,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
        )

    def seal(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, batch: BatchMetadata) -> None:
        from ..kernels import reference_seal_kv

        reference_seal_kv(
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
        from ..kernels import reference_rotate_heads

        if kv.turn_factor is not None:
            query = reference_rotate_heads(query, kv.turn_factor, divide=False).to(query.dtype)
        out = query.new_zeros(query.shape[0], query.shape[1], kv.value_dim)
        blocks = batch.host_blocks if batch.host_blocks is not None else batch.block_table.tolist()
        tail_blocks: list[list[int]] = []
        if kv.tail is not None:
            tail_blocks = batch.tail.host_blocks or batch.tail.block_table.tolist()
        start = 0
        for request, (new, length) in enumerate(zip(batch.query_lens, batch.host_seq_lens, strict=True)):
            stop = start + new
            first = 0 if batch.host_kv_start is None else batch.host_kv_start[request]
            for chunk in range(start, stop, CHUNK):
                end = min(chunk + CHUNK, stop)
                last = length - (stop - end)  # one past the position of the chunk's newest query
                begin = first if spec.window is None else max(first, last - (end - chunk) - spec.window + 1)
                if begin >= last:
                    continue  # nothing but padding
                sealed = last if kv.tail is None else min(batch.tail.host_sealed[request], last)
                parts = []
                if begin < sealed:
                    parts.append(_gather_both(kv, blocks[request], begin, sealed, batch.block_size, query.dtype))
                if sealed < last:
                    newest = tail_blocks[request], max(begin, sealed), last
                    parts.append(_gather_both(kv.tail, *newest, batch.block_size, query.dtype))
                key, value = parts[0] if len(parts) == 1 else (torch.cat(both, 1) for both in zip(*parts, strict=True))
                out[chunk:end] = _attend(query[chunk:end], key, value, spec, begin, last)
            start = stop
        return out


def _gather_both(kv: PagedKV, blocks: list[int], begin: int, end: int, block_size: int, dtype: torch.dtype):
    """Keys and values of positions begin .. end - 1, as `_gather` gives them."""
    from ..kernels import decode_keys, decode_values

    return (
        _gather(kv.k_pool, kv.k_scale, decode_keys, blocks, begin, end, block_size, dtype),
        _gather(kv.v_pool, kv.v_scale, decode_values, blocks, begin, end, block_size, dtype),
    )


def _gather(
    pool, scale, decode, blocks: list[int], begin: int, end: int, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Positions begin .. end - 1 of one request as `[Hkv, end - begin, D]`, decoded."""
    needed = blocks[begin // block_size : -(-end // block_size)]
    skip = begin - begin // block_size * block_size
    consecutive = all(b == needed[0] + i for i, b in enumerate(needed))

    def rows(memory: torch.Tensor) -> torch.Tensor:
        # [num_blocks, block_size, Hkv, ...] -> [Hkv, tokens, ...]; a view where the blocks are consecutive
        heads_first = memory.movedim(2, 0)
        picked = heads_first[:, needed[0] : needed[0] + len(needed)] if consecutive else heads_first[:, needed]
        return picked.flatten(1, 2)[:, skip : skip + end - begin]

    if pool.dtype == torch.uint8:  # int4, whose groups may run over tokens: decoded in whole blocks
        return (
            decode(pool[needed], scale[needed]).permute(2, 0, 1, 3).flatten(1, 2)[:, skip:][:, : end - begin].to(dtype)
        )
    values = rows(pool)
    if scale is None:
        return values.to(dtype)
    return (values.to(torch.float32) * rows(scale).unsqueeze(-1)).to(dtype)


def _attend(query, key, value, spec: AttentionSpec, begin: int, end: int) -> torch.Tensor:
    """Queries `[T, Hq, D]`, the newest of keys `[Hkv, L, D]` at positions begin .. end - 1: `[T, Hq, Dv]`."""
    tokens, query_heads, dim = query.shape
    heads, length, _ = key.shape
    group = query_heads // heads
    rows = query.view(tokens, heads, group, dim).permute(1, 2, 0, 3).reshape(heads, group * tokens, dim)
    mask = None
    if tokens > 1 or (spec.window is not None and length > spec.window):
        position = torch.arange(end - tokens, end, device=query.device).unsqueeze(1)
        keys_at = torch.arange(begin, end, device=query.device)
        mask = keys_at <= position
        if spec.window is not None:
            mask &= keys_at > position - spec.window
        mask = mask.repeat(group, 1)
    if spec.softcap is None and spec.sinks is None:
        out = F.scaled_dot_product_attention(
            rows.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask=mask, scale=spec.scale
        ).squeeze(0)
        if mask is not None:
            out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    else:
        out = _softmax_attention(rows, key, value, mask, spec, group, tokens)
    return out.view(heads, group, tokens, -1).permute(2, 0, 1, 3).reshape(tokens, query_heads, -1)


def _softmax_attention(rows, key, value, mask, spec: AttentionSpec, group: int, tokens: int) -> torch.Tensor:
    scores = torch.matmul(rows, key.transpose(1, 2)).float() * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(key.shape[0], group, 1, 1).expand(-1, -1, tokens, 1)
        scores = torch.cat([scores, sinks.reshape(key.shape[0], group * tokens, 1)], -1)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top.isinf(), torch.zeros_like(top), top))
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-38)
    if spec.sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)
