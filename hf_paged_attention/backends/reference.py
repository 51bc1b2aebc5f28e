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

    def attend(self, query: torch.Tensor, kv: PagedKV, batch: BatchMetadata, spec: AttentionSpec) -> torch.Tensor:
        from ..kernels import reference_rotate_heads

        if kv.turn_factor is not None:
            query = reference_rotate_heads(query, kv.turn_factor, divide=False).to(query.dtype)
        out = query.new_zeros(query.shape[0], query.shape[1], kv.v_pool.shape[-1])
        blocks = batch.host_blocks if batch.host_blocks is not None else batch.block_table.tolist()
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
                key, value = (
                    _gather(pool, scale, blocks[request], begin, last, batch.block_size, query.dtype)
                    for pool, scale in ((kv.k_pool, kv.k_scale), (kv.v_pool, kv.v_scale))
                )
                out[chunk:end] = _attend(query[chunk:end], key, value, spec, begin, last)
            start = stop
        return out


def _gather(pool, scale, blocks: list[int], begin: int, end: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Positions begin .. end - 1 of one request as `[Hkv, end - begin, D]`, decoded."""
    needed = blocks[begin // block_size : -(-end // block_size)]
    skip = begin - begin // block_size * block_size
    consecutive = all(b == needed[0] + i for i, b in enumerate(needed))

    def rows(memory: torch.Tensor) -> torch.Tensor:
        # [num_blocks, block_size, Hkv, ...] -> [Hkv, tokens, ...]; a view where the blocks are consecutive
        heads_first = memory.movedim(2, 0)
        picked = heads_first[:, needed[0] : needed[0] + len(needed)] if consecutive else heads_first[:, needed]
        return picked.flatten(1, 2)[:, skip : skip + end - begin]

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
