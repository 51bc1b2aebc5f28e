"""The specification of every kernel, in PyTorch on the same pages.

Arithmetic is float32, or float64 when the query is float64.
"""

import torch

from .int4 import dequantize_keys, dequantize_values, quantize_values


def decode_keys(pool: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The keys [..., block_size, Hkv, D] of a pool, or of some of its blocks."""
    if pool.dtype == torch.uint8:
        return dequantize_keys(pool, scales, dtype)
    return pool.to(dtype) if scales is None else pool.to(dtype) * scales.unsqueeze(-1).to(dtype)


def decode_values(pool: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values [..., block_size, Hkv, Dv] of a pool, or of some of its blocks."""
    if pool.dtype == torch.uint8:
        return dequantize_values(pool, scales, dtype)
    return decode_keys(pool, scales, dtype)


def _entries(decode, pool, scales, blocks, length, dtype):
    """The first `length` keys or values of the pages `blocks`, decoded: [length, Hkv, D]."""
    return decode(pool[blocks], None if scales is None else scales[blocks], dtype).flatten(0, 1)[:length]


def reference_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    v_tail: torch.Tensor | None = None,
    tail_table: torch.Tensor | None = None,
    sealed_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `unified_attention` and `decode_attention` compute, request by request; see there for shapes.

    query may be float64 too. query_start_loc None means one query token a request. Reads the lengths on the host.
    """
    tokens, query_heads, _ = query.shape
    block_size, kv_heads = k_pool.shape[1], k_pool.shape[2]
    if out is None:
        out = query.new_empty(tokens, query_heads, v_pool.shape[-1])
    starts = range(len(seq_lens) + 1) if query_start_loc is None else query_start_loc.tolist()
    lengths = seq_lens.tolist()
    first_keys = [0] * len(lengths) if kv_start is None else kv_start.tolist()
    dtype = torch.promote_types(query.dtype, torch.float32)
    for request, length in enumerate(lengths):
        new = slice(starts[request], starts[request + 1])
        q = query[new].to(dtype)
        if len(q) == 0:
            continue
        # Blocks behind the window or before the first key may be gone: neither looked up nor read.
        first = max(first_keys[request], 0 if window is None else length - len(q) - window + 1, 0) // block_size
        offset = first * block_size
        blocks = block_table[request, first : -(-length // block_size)].long()
        count = max(length - offset, 0)
        sealed = count if sealed_lens is None else min(max(int(sealed_lens[request]) - offset, 0), count)
        blocks = blocks[: -(-sealed // block_size)]
        k = _entries(decode_keys, k_pool, k_scale, blocks, sealed, dtype)
        v = _entries(decode_values, v_pool, v_scale, blocks, sealed, dtype)
        if sealed < count:
            newest = tail_table[request, first + sealed // block_size : -(-length // block_size)].long()
            k = torch.cat([k, k_tail[newest].flatten(0, 1)[: count - sealed].to(dtype)])
            v = torch.cat([v, v_tail[newest].flatten(0, 1)[: count - sealed].to(dtype)])
        key_pos = torch.arange(offset, offset + len(k), device=query.device)
        query_pos = torch.arange(length - len(q), length, device=query.device)

        q = q.unflatten(1, (kv_heads, query_heads // kv_heads))
        logits = torch.einsum("thgd,shd->hgts", q, k) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen = (key_pos <= query_pos[:, None]) & (key_pos >= first_keys[request])
        if window is not None:
            seen &= key_pos > query_pos[:, None] - window
        logits = logits.masked_fill(~seen, -torch.inf)
        # Slots never written may hold NaN, and 0 * NaN is NaN.
        v = v.masked_fill(~seen.any(0)[:, None, None], 0)

        row_lse = torch.logsumexp(logits, -1)
        if sinks is not None:
            row_lse = torch.logaddexp(row_lse, sinks.to(dtype).view(kv_heads, -1, 1).expand_as(row_lse))
        weights = torch.exp(logits - row_lse.masked_fill(row_lse == -torch.inf, 0)[..., None])
        out[new] = torch.einsum("hgts,shd->thgd", weights, v).flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[new] = row_lse.permute(2, 0, 1).flatten(1).to(lse.dtype)
    return out


def reference_merge_splits(partial_out: torch.Tensor, partial_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over disjoint sets of keys from the attention over each (FlashDecoding).

    Args:
        partial_out: [S, ..., Dv], the output over each set.
        partial_lse: [S, ...], its natural log-sum-exp; -inf for an empty set, whose output is ignored.

    Returns:
        The output [..., Dv] and log-sum-exp [...] over all keys; zeros and -inf where every set is empty.
    """
    lse = torch.logsumexp(partial_lse, 0)
    weights = torch.exp(partial_lse - lse.masked_fill(lse == -torch.inf, 0))
    out = partial_out.masked_fill((partial_lse == -torch.inf)[..., None], 0)
    return (weights[..., None] * out).sum(0), lse


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes and scales, one scale a row of the last dimension."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    # The floor keeps a token of zeros, or of denormals, from dividing by zero.
    amax = x.abs().amax(-1)
    # By a tensor: CUDA divides by a number by multiplying with its reciprocal, which may round otherwise.
    scales = (amax / amax.new_full((), largest)).clamp_min(1e-30)
    codes = (x / scales[..., None]).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def reference_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """What `write_kv` does; see there for shapes."""
    held = slot_mapping >= 0
    for new, pool, scales in ((key, k_pool, k_scale), (value, v_pool, v_scale)):
        write_rows(new[held], pool, scales, slot_mapping[held])


def write_rows(new: torch.Tensor, pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> None:
    """New keys or values [N, Hkv, D] into slots [N] of one pool, in a format that encodes a token by itself."""
    at = slots // pool.shape[1], slots % pool.shape[1]
    if scales is None:
        pool[at] = new.to(pool.dtype)
    elif pool.dtype == torch.uint8:
        pool[at], scales[at] = quantize_values(new)
    else:
        codes, row_scales = quantize(new.float(), pool.dtype)
        # Indexed writes of float8 are not implemented everywhere; bytes are.
        pool.view(torch.uint8)[at] = codes.view(torch.uint8)
        scales[at] = row_scales
