"""Attention of a ragged batch over paged keys and values, any number of query tokens a request.

    out[t, h] = sum_j softmax_j(cap(scale q[t, h] . k[j, h // G])) v[j, h // G]
    over the keys max(kv_start, pos_t - window + 1) <= j <= pos_t

query [N, Hq, D], pools [num_blocks, block_size, Hkv, D or Dv], out [N, Hq, Dv]; G = Hq / Hkv heads share a KV head and
fill the rows of one tile: row r is token r // G of the tile, head r % G of the group. Keys and values may be stored in
different formats. Where keys are int4, those from sealed_lens [R] on are in the tail's pools, as they arrived.
Grid: (KV heads, tiles of BLOCK_M // G query tokens over all requests), a request's last (longest) tile first.
"""

import torch
import triton
import triton.language as tl

from .arguments import layout_arguments
from .checks import AttentionShape, check_attention
from .convert import FLOAT, dot_dtypes, fitted, pool_bytes, pool_factor, pool_format
from .dependent import dependent_launch, follow
from .known_calls import Launch, known_call
from .launch import UnifiedPlan, plan_unified, query_tiles
from .pool_descriptors import pool_matrix
from .softmax import LN_2, LOG2_E, attend_tiles


@triton.jit
def request_of_tile(query_start_ptr, tile, num_requests, TILE_TOKENS: tl.constexpr):
    """The request whose query tokens tile `tile` holds.

    Request r owns the tiles from query_start[r] // TILE_TOKENS + r on: one spare tile a request, so that tile counts
    need no prefix sum (the numbering of vLLM's unified kernel).
    """
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start_ptr + middle) // TILE_TOKENS + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _unified_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    kv_start_ptr,
    k_desc,
    v_desc,
    k_tail_ptr,
    v_tail_ptr,
    tail_table_ptr,
    sealed_lens_ptr,
    num_requests,
    scale,
    softcap,
    out_factor,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_k_d,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_v_d,
    stride_ks_block,
    stride_ks_slot,
    stride_ks_head,
    stride_vs_block,
    stride_vs_slot,
    stride_vs_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_table,
    k_head_rows,
    k_block_rows,
    v_head_rows,
    v_block_rows,
    stride_kt_block,
    stride_kt_slot,
    stride_kt_head,
    stride_kt_d,
    stride_vt_block,
    stride_vt_slot,
    stride_vt_head,
    stride_vt_d,
    stride_tail_table,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    TAIL_DTYPE: tl.constexpr,
    VALUES_BY_SLOT: tl.constexpr,
    NEGATED: tl.constexpr,
    TAIL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # A request's last tile, which sees most keys, comes first; requests in the batch's order.
    tile = tl.program_id(1)
    request = request_of_tile(query_start_ptr, tile, num_requests, TILE_TOKENS)
    query_start = tl.load(query_start_ptr + request)
    query_end = tl.load(query_start_ptr + request + 1)
    query_len = query_end - query_start
    first_token = (query_end // TILE_TOKENS + request - tile) * TILE_TOKENS
    # A spare tile, or one past the last request's.
    if first_token >= query_len or first_token < 0:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    kv_start = 0
    if kv_start_ptr is not None:
        kv_start = tl.load(kv_start_ptr + request)

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_held = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    first_pos = seq_len - query_len + first_token
    last_pos = seq_len - query_len + tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    row_pos = seq_len - query_len + tokens

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    row_token = (query_start + tokens).to(tl.int64)
    q_at = query_ptr + (row_token * stride_q_token + heads * stride_q_head)[:, None] + d[None, :]
    q_held = row_held[:, None] & (d[None, :] < D)
    q = tl.load(q_at, mask=q_held, other=0.0)
    if NEGATED:
        q = -q
    q, pool_scale = fitted(q, scale, KEY_DTYPE)

    if sinks_ptr is not None:
        row_max = tl.load(sinks_ptr + heads, mask=row_held, other=0.0).to(tl.float32) * LOG2_E
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # Tiles before `full_tile` cut the window's or the request's first key, those from `diagonal_tile` on causality.
    end = last_pos + 1
    first_held = kv_start
    first_full = kv_start
    if WINDOW > 0:
        first_held = tl.maximum(kv_start, first_pos - WINDOW + 1)
        first_full = tl.maximum(kv_start, last_pos - WINDOW + 1)
    pool_end = end
    full_end = first_pos + 1
    if TAIL:
        sealed = tl.load(sealed_lens_ptr + request)
        pool_end = tl.minimum(end, sealed)
        full_end = tl.minimum(full_end, sealed)
    first_tile = first_held // BLOCK_N
    last_tile = tl.cdiv(pool_end, BLOCK_N)
    full_tile = tl.minimum(tl.cdiv(first_full, BLOCK_N), last_tile)
    diagonal_tile = tl.maximum(full_end // BLOCK_N, full_tile)

    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    if KEY_FORMAT != FLOAT:
        k_scale_ptr += kv_head.to(tl.int64) * stride_ks_head
    if VALUE_FORMAT != FLOAT:
        v_scale_ptr += kv_head.to(tl.int64) * stride_vs_head
    table_ptr += request.to(tl.int64) * stride_table
    # Without a window or a first key nothing is cut before the diagonal, and there is no code for it.
    first_phase: tl.constexpr = 0 if WINDOW > 0 or kv_start_ptr is not None else 1
    for phase in tl.static_range(first_phase, 3):
        if phase == 0:
            low = first_tile
            high = full_tile
        elif phase == 1:
            low = full_tile
            high = diagonal_tile
        else:
            low = diagonal_tile
            high = last_tile
        acc, row_max, row_sum = attend_tiles(
            acc,
            row_max,
            row_sum,
            q,
            row_pos,
            low,
            high,
            first_held,
            pool_end,
            k_ptr,
            v_ptr,
            k_scale_ptr,
            v_scale_ptr,
            table_ptr,
            pool_scale,
            softcap,
            stride_k_block,
            stride_k_slot,
            stride_k_d,
            stride_v_block,
            stride_v_slot,
            stride_v_d,
            stride_ks_block,
            stride_ks_slot,
            stride_vs_block,
            stride_vs_slot,
            k_desc,
            v_desc,
            kv_head * k_head_rows,
            kv_head * v_head_rows,
            k_block_rows,
            v_block_rows,
            D,
            DV,
            WINDOW,
            KEY_FORMAT,
            VALUE_FORMAT,
            PAGE,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            phase != 1,
            VALUE_DTYPE,
            VALUES_BY_SLOT,
        )

    if TAIL:
        tail_first = tl.maximum(first_held, sealed)
        # The newest tokens, as they arrived. What the pool's values leave out, these hold.
        acc = acc * out_factor
        tail_table_ptr += request.to(tl.int64) * stride_tail_table
        q = tl.load(q_at, mask=q_held, other=0.0).to(TAIL_DTYPE)
        if NEGATED:
            q = -q
        acc, row_max, row_sum = attend_tiles(
            acc,
            row_max,
            row_sum,
            q,
            row_pos,
            tail_first // BLOCK_N,
            tl.where(end > sealed, tl.cdiv(end, BLOCK_N), 0),
            tail_first,
            end,
            k_tail_ptr + kv_head.to(tl.int64) * stride_kt_head,
            v_tail_ptr + kv_head.to(tl.int64) * stride_vt_head,
            None,
            None,
            tail_table_ptr,
            scale,
            softcap,
            stride_kt_block,
            stride_kt_slot,
            stride_kt_d,
            stride_vt_block,
            stride_vt_slot,
            stride_vt_d,
            0,
            0,
            0,
            0,
            None,
            None,
            0,
            0,
            0,
            0,
            D,
            DV,
            WINDOW,
            FLOAT,
            FLOAT,
            PAGE,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            True,
            TAIL_DTYPE,
            False,
        )

    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc * ((1.0 if TAIL else out_factor) / total)[:, None]
    out_at = out_ptr + (row_token * stride_out_token + heads * stride_out_head)[:, None] + dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_held[:, None] & (dv[None, :] < DV))
    if lse_ptr is not None:
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(total)) * LN_2)
        tl.store(lse_ptr + row_token * stride_lse_token + heads * stride_lse_head, lse, mask=row_held)


def unified_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
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
    plan: UnifiedPlan | None = None,
) -> torch.Tensor:
    """Attention of N query tokens of R requests, straight from the pages; `reference_attention` is its specification.

    Args:
        query: [N, Hq, D], float32, bfloat16 or float16, last dimension contiguous.
        k_pool: [num_blocks, block_size, Hkv, D], any strides; a float dtype, int8, float8_e4m3fn, or uint8 for int4,
            [num_blocks, block_size, Hkv, D / 2] as in int4.py. block_size is a power of two of at least 16 (32 for int4
            keys), or anything when the table has one column.
        v_pool: [num_blocks, block_size, Hkv, Dv], as k_pool; the dtypes may differ.
        query_start_loc: int32 [R + 1], first query token of each request; may end before N.
        seq_lens: int32 [R], cached tokens with the new ones. Query t of request r is at seq_lens[r] - query_len + t.
        block_table: int32 [R, max_blocks], the block of each block_size keys.
        max_query_len, max_seq_len: bounds known to the host, in tokens.
        scale: multiplies q . k.
        window: keys a query sees, itself included; None for all.
        softcap: c in s -> c tanh(s / c), applied to scaled scores (Gemma 2).
        sinks: [Hq], a logit a head with no value (gpt-oss); not scaled.
        k_scale, v_scale: float32 [num_blocks, block_size, Hkv], what 8-bit keys and values are multiplied by; float16
            scales and zero points of int4, [num_blocks, block_size / 32, Hkv, 2, D] for keys and [num_blocks,
            block_size, Hkv, 2, groups] for values, contiguous in the last two.
        kv_start: int32 [R], keys before it are not attended.
        k_tail, v_tail, tail_table, sealed_lens: for int4 keys, the request's tokens from sealed_lens [R] on, a multiple
            of block_size, which are not encoded yet: pools as k_pool and v_pool of a float dtype, with a table as
            block_table whose column c holds the same keys.
        out: [N, Hq, Dv] to write to, query's dtype, last dimension contiguous.
        lse: float32 [N, Hq] to write the natural log-sum-exp of each row's logits (sink included) to.
        plan: a `UnifiedPlan` to use instead of the one chosen for the shape.

    Returns:
        out. A query with no key gives zeros, and lse -inf or its sink.

    Raises:
        ValueError: a shape, dtype or stride other than the above, named with its value.
    """
    given = plan

    def prepare() -> tuple[AttentionShape, UnifiedPlan | None]:
        shape = check_attention(
            query, k_pool, v_pool, query_start_loc, seq_lens, block_table, window, softcap, sinks, k_scale, v_scale,
            kv_start, k_tail, v_tail, tail_table, sealed_lens, out, lse,
        )  # fmt: skip
        if given is not None or shape.tokens == 0 or shape.requests == 0:
            return shape, given
        return shape, plan_unified(shape, max_query_len=max_query_len, max_seq_len=max_seq_len, window=window)

    tensors = (
        query, k_pool, v_pool, query_start_loc, seq_lens, block_table, sinks, k_scale, v_scale, kv_start, k_tail,
        v_tail, tail_table, sealed_lens, out, lse,
    )  # fmt: skip
    # max_seq_len has no say in the plan.
    call = known_call(prepare, tensors, "unified", max_query_len, scale, window, softcap, given, query.device)
    shape, plan = call.shape, call.plan
    if out is None:
        out = query.new_empty(shape.tokens, shape.query_heads, shape.value_dim)
    if shape.tokens == 0 or shape.requests == 0:
        return out
    if plan.specialised and softcap is None and shape.page == k_pool.shape[1]:
        # Gluon, which not every Triton has.
        if shape.quantized:
            from .hopper_8bit import specialised_8bit_attention as specialised

            scales = {"k_scale": k_scale, "v_scale": v_scale}
        else:
            from .hopper import specialised_attention as specialised

            scales = {}
        taken = specialised(
            call, query, k_pool, v_pool, out, plan.specialised, query_start_loc=query_start_loc, seq_lens=seq_lens,
            block_table=block_table, scale=scale, window=window, sinks=sinks, kv_start=kv_start, lse=lse, **scales,
        )  # fmt: skip
        if taken:
            return out
    k_bytes, v_bytes = pool_bytes(k_pool), pool_bytes(v_pool)
    block_d, block_dv = shape.channels
    k_matrix = v_matrix = None
    if plan.descriptors and shape.page == k_pool.shape[1]:
        k_matrix = pool_matrix(k_bytes, keys=plan.block_n, channels=block_d) if k_pool.dtype != torch.uint8 else None
        v_matrix = pool_matrix(v_bytes, keys=plan.block_n, channels=block_dv) if v_pool.dtype != torch.uint8 else None

    def rest() -> Launch:
        key_dtype, value_dtype = dot_dtypes(query.dtype, k_pool.dtype, v_pool.dtype)
        tail_dtype, _ = dot_dtypes(query.dtype, query.dtype, query.dtype)
        layout = layout_arguments(
            query, k_bytes, v_bytes, k_scale, v_scale, out, lse, block_table, k_matrix, v_matrix, k_tail, v_tail,
            tail_table,
        )  # fmt: skip
        numbers = (
            shape.requests,
            abs(scale) * pool_factor(k_pool.dtype) * (1.0 if softcap else LOG2_E.value),
            softcap,
            pool_factor(v_pool.dtype),
            *layout,
        )
        constants = dict(
            GROUP=shape.group,
            D=shape.head_dim,
            DV=shape.value_dim,
            WINDOW=window or 0,
            KEY_FORMAT=pool_format(k_pool.dtype).value,
            VALUE_FORMAT=pool_format(v_pool.dtype).value,
            PAGE=shape.page,
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            KEY_DTYPE=key_dtype,
            VALUE_DTYPE=value_dtype,
            TAIL_DTYPE=tail_dtype,
            VALUES_BY_SLOT=v_pool.stride(1) == 1,
            NEGATED=scale < 0,
            TAIL=sealed_lens is not None,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            **dependent_launch(query.device),
        )
        return (shape.kv_heads, query_tiles(shape, plan.block_m), 1), numbers, constants

    tensors = (
        query, k_bytes, v_bytes, k_scale, v_scale, sinks, out, lse, query_start_loc, seq_lens, block_table, kv_start,
        k_matrix and k_matrix.descriptor, v_matrix and v_matrix.descriptor, k_tail, v_tail, tail_table, sealed_lens,
    )  # fmt: skip
    call.launch(_unified_kernel, tensors, rest)
    return out
