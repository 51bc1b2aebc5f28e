"""Attention of one query token a request over paged keys and values, each request's keys split over several programs.

    out[r, h] = sum_s 2^(lse[s, h] - lse[h]) out_s[h],   s over the splits of request r's keys (FlashDecoding)

query [R, Hq, D], pools [num_blocks, block_size, Hkv, D or Dv], partial outputs [C, Hq, Dv] and log-sum-exps [C, Hq].
Grid: (KV heads, C): C bounds the splits of all requests; each program finds its request and keys from the lengths.
"""

import torch
import triton
import triton.language as tl

from .arguments import layout_arguments
from .checks import AttentionShape, check_attention
from .convert import ASSEMBLY, FLOAT, dot_dtypes, fitted, pool_bytes, pool_factor, pool_format
from .counters import take_counters
from .dependent import dependent_launch, follow
from .integers import cdiv, next_power_of_2
from .known_calls import Launch, known_call
from .launch import REGIME_KEYS, DecodePlan, plan_decode
from .merge import merge_partials
from .pool_descriptors import pool_matrix
from .softmax import LN_2, LOG2_E, attend_tiles
from .transposed import attend_tiles_transposed, query_columns

# Tiles more a split that are better borne than a second level of merging.
SECOND_LEVEL = tl.constexpr(4)


@triton.jit
def key_tiles(seq_lens, kv_start_ptr, requests, held, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key, first tile and number of tiles that a request's query attends; elementwise over `requests`."""
    first_key = tl.zeros_like(seq_lens)
    if kv_start_ptr is not None:
        first_key = tl.load(kv_start_ptr + requests, mask=held, other=0)
    if WINDOW > 0:
        first_key = tl.maximum(first_key, seq_lens - WINDOW)
    first_tile = first_key // BLOCK_N
    return first_key, first_tile, tl.maximum(tl.cdiv(seq_lens, BLOCK_N) - first_tile, 0)


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,
    out,
    lse,
    heads,
    row_held,
    stride_out_head,
    stride_lse_head,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Rows of one token's output and log-sum-exps, one a head."""
    dv = tl.arange(0, BLOCK_DV)
    out_at = out_ptr + (heads * stride_out_head)[:, None] + dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_held[:, None] & (dv < DV)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + heads * stride_lse_head, lse, mask=row_held)


@triton.jit
def store_partial(partial_out_ptr, partial_lse_ptr, out, lse, at, held, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Rows `at` of the partial outputs, past L1: another SM reads them."""
    dv = tl.arange(0, BLOCK_DV)
    out_at = partial_out_ptr + at[:, None] * DV + dv[None, :]
    tl.store(out_at, out, mask=held[:, None] & (dv < DV)[None, :], cache_modifier=".cg")
    tl.store(partial_lse_ptr + at, lse, mask=held, cache_modifier=".cg")


@triton.jit
def arrives_last(counter_at, expected):
    """Whether this program is the last of `expected` to come here; it leaves the counter at 0 for the next launch.

    What the others stored before they came is visible to it.
    """
    # Every thread's stores must come before the one thread's release.
    tl.debug_barrier()
    last = tl.atomic_add(counter_at, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter_at, 0)
    return last


@triton.jit(do_not_specialize=["num_requests", "split_programs", "min_tiles"])
def _decode_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    counter_ptr,
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
    split_programs,
    min_tiles,
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
    TRANSPOSED: tl.constexpr,
    BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    SLOTS: tl.constexpr,
    VALUES_BY_SLOT: tl.constexpr,
    NEGATED: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TEAM: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    TAIL_DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    kv_heads = tl.num_programs(0)

    # Every split has about the same number of tiles, whatever its request's length: one long request among short ones
    # is spread over the SMs. Each program repeats this small count: cheaper than a launch, and no host knows them.
    # An eighth more than that is borne, so that a request just too long for one split does not become two.
    requests = tl.arange(0, BLOCK_R)
    held = requests < num_requests
    lens = tl.load(seq_lens_ptr + requests, mask=held, other=0)
    _, _, tiles = key_tiles(lens, kv_start_ptr, requests, held, WINDOW, BLOCK_N)
    split_tiles = tl.maximum(tl.cdiv(tl.sum(tiles, 0), split_programs), min_tiles)
    splits = tl.maximum(tl.cdiv(tiles, split_tiles + split_tiles // 8), 1)
    splits = tl.where((splits > TEAM) & (tl.cdiv(tiles, TEAM) <= split_tiles + SECOND_LEVEL), TEAM, splits)
    splits = tl.where(held, splits, 0)
    last_program = tl.cumsum(splits, 0)
    request = tl.sum((last_program <= program).to(tl.int32), 0)
    if request >= num_requests:
        return
    first_program = tl.sum(tl.where(requests < request, splits, 0), 0)
    num_splits = tl.sum(tl.where(requests == request, splits, 0), 0)

    seq_len = tl.load(seq_lens_ptr + request)
    first_key, first_tile, num_tiles = key_tiles(seq_len, kv_start_ptr, request, True, WINDOW, BLOCK_N)
    split = program - first_program
    low = first_tile + split * (num_tiles // num_splits) + tl.minimum(split, num_tiles % num_splits)
    high = low + num_tiles // num_splits + (split < num_tiles % num_splits).to(tl.int32)

    rows = tl.arange(0, BLOCK_M)
    row_held = rows < GROUP
    heads = kv_head * GROUP + rows
    d = tl.arange(0, BLOCK_D)
    token = request.to(tl.int64)
    if query_start_ptr is not None:
        token = tl.load(query_start_ptr + request).to(tl.int64)
        if tl.load(query_start_ptr + request + 1) <= token:
            return
    q_at = query_ptr + token * stride_q_token + heads * stride_q_head
    q = tl.load(q_at[:, None] + d[None, :], mask=row_held[:, None] & (d[None, :] < D), other=0.0)
    if NEGATED:
        q = -q
    pool_scale = scale
    if BYTES:
        q, q_factor = query_columns(q, KEY_FORMAT, PIECES, SLOTS, BLOCK_M, BLOCK_D)
    else:
        q_factor = None
        q, pool_scale = fitted(q, scale, KEY_DTYPE)
        if TRANSPOSED:
            q = tl.trans(q)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None and split == 0:
        row_max = tl.load(sinks_ptr + heads, mask=row_held, other=0.0).to(tl.float32) * LOG2_E
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    if TRANSPOSED:
        acc = tl.zeros([BLOCK_DV, BLOCK_M], tl.float32)
        row_sum = tl.where(tl.arange(0, BLOCK_N)[:, None] == 0, row_sum[None, :], 0.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    k_ptr += kv_head.to(tl.int64) * stride_k_head
    v_ptr += kv_head.to(tl.int64) * stride_v_head
    if KEY_FORMAT != FLOAT:
        k_scale_ptr += kv_head.to(tl.int64) * stride_ks_head
    if VALUE_FORMAT != FLOAT:
        v_scale_ptr += kv_head.to(tl.int64) * stride_vs_head
    table_ptr += request.to(tl.int64) * stride_table
    row_pos = tl.zeros([BLOCK_M], tl.int32) + seq_len - 1
    # Only the request's first and last tiles hold keys that the query must not see.
    pool_end = seq_len
    pool_high = high
    if TAIL:
        pool_end = tl.load(sealed_lens_ptr + request)
        pool_high = tl.minimum(high, tl.cdiv(pool_end, BLOCK_N))
    full_low = tl.minimum(tl.maximum(low, tl.cdiv(first_key, BLOCK_N)), tl.maximum(low, pool_high))
    full_high = tl.maximum(tl.minimum(pool_high, pool_end // BLOCK_N), full_low)
    # Without a window or a first key only the last tile does, and there is no code for a first.
    first_phase: tl.constexpr = 0 if WINDOW > 0 or kv_start_ptr is not None else 1
    for phase in tl.static_range(first_phase, 3):
        if phase == 0:
            phase_low = low
            phase_high = full_low
        elif phase == 1:
            phase_low = full_low
            phase_high = full_high
        else:
            phase_low = full_high
            phase_high = pool_high
        if TRANSPOSED:
            acc, row_max, row_sum = attend_tiles_transposed(
                acc,
                row_max,
                row_sum,
                q,
                q_factor,
                phase_low,
                phase_high,
                first_key,
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
                KEY_FORMAT,
                VALUE_FORMAT,
                PAGE,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                phase != 1,
                VALUE_DTYPE,
                BYTES,
                PIECES,
                SLOTS,
                BLOCK_M,
                VALUES_BY_SLOT,
            )
        else:
            acc, row_max, row_sum = attend_tiles(
                acc,
                row_max,
                row_sum,
                q,
                row_pos,
                phase_low,
                phase_high,
                first_key,
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
                None,
                None,
                0,
                0,
                0,
                0,
                D,
                DV,
                0,
                KEY_FORMAT,
                VALUE_FORMAT,
                PAGE,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                phase != 1,
                VALUE_DTYPE,
                False,
            )
    if TAIL:
        # The newest tokens, as they arrived. What the pool's values leave out, these hold.
        acc = acc * out_factor
        tail_table_ptr += request.to(tl.int64) * stride_tail_table
        q = tl.load(q_at[:, None] + d[None, :], mask=row_held[:, None] & (d[None, :] < D), other=0.0).to(TAIL_DTYPE)
        if NEGATED:
            q = -q
        tail_low = tl.maximum(low, pool_end // BLOCK_N)
        tail_first_key = tl.maximum(first_key, pool_end)
        k_tail_ptr += kv_head.to(tl.int64) * stride_kt_head
        v_tail_ptr += kv_head.to(tl.int64) * stride_vt_head
        if TRANSPOSED:
            acc, row_max, row_sum = attend_tiles_transposed(
                acc,
                row_max,
                row_sum,
                tl.trans(q),
                None,
                tail_low,
                high,
                tail_first_key,
                seq_len,
                k_tail_ptr,
                v_tail_ptr,
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
                FLOAT,
                FLOAT,
                PAGE,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                True,
                TAIL_DTYPE,
                False,
                PIECES,
                SLOTS,
                BLOCK_M,
                False,
            )
        else:
            acc, row_max, row_sum = attend_tiles(
                acc,
                row_max,
                row_sum,
                q,
                row_pos,
                tail_low,
                high,
                tail_first_key,
                seq_len,
                k_tail_ptr,
                v_tail_ptr,
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
                0,
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
    if TRANSPOSED:
        row_sum = tl.sum(row_sum, 0)
        acc = tl.trans(acc)
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * ((1.0 if BYTES or TAIL else out_factor) / total)[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(total)) * LN_2)
    out_ptr += token * stride_out_token
    if lse_ptr is not None:
        lse_ptr += token * stride_lse_token

    if num_splits == 1:
        store_rows(out_ptr, lse_ptr, acc, lse, heads, row_held, stride_out_head, stride_lse_head, DV, BLOCK_DV)
        return
    # The last split to finish merges its team of splits, the last team to finish merges the teams: one program alone
    # would be reading the partial outputs of a hundred splits for longer than the others had read keys.
    query_heads = kv_heads * GROUP
    partials = tl.num_programs(1)
    store_partial(
        partial_out_ptr, partial_lse_ptr, acc, lse, program.to(tl.int64) * query_heads + heads, row_held, DV, BLOCK_DV
    )
    group = tl.arange(0, BLOCK_G)
    group_heads = kv_head * GROUP + group
    group_held = group < GROUP
    team = split // TEAM
    teams = tl.cdiv(num_splits, TEAM)
    first_of_team = first_program + team * TEAM
    splits_in_team = tl.minimum(num_splits - team * TEAM, TEAM)
    if arrives_last(counter_ptr + first_of_team * kv_heads + kv_head, splits_in_team):
        merged, merged_lse = merge_partials(
            partial_out_ptr,
            partial_lse_ptr,
            first_of_team,
            1,
            splits_in_team,
            query_heads,
            group_heads,
            group_held,
            DV,
            BLOCK_G,
            BLOCK_S,
            BLOCK_DV,
        )
        is_whole = teams == 1
        if teams > 1:
            # In place of the team's first split, which every thread has read by now.
            tl.debug_barrier()
            first_rows = first_of_team.to(tl.int64) * query_heads + group_heads
            store_partial(partial_out_ptr, partial_lse_ptr, merged, merged_lse, first_rows, group_held, DV, BLOCK_DV)
            if arrives_last(counter_ptr + (partials + request) * kv_heads + kv_head, teams):
                merged, merged_lse = merge_partials(
                    partial_out_ptr,
                    partial_lse_ptr,
                    first_program,
                    TEAM,
                    teams,
                    query_heads,
                    group_heads,
                    group_held,
                    DV,
                    BLOCK_G,
                    BLOCK_S,
                    BLOCK_DV,
                )
                is_whole = True
        if is_whole:
            store_rows(
                out_ptr,
                lse_ptr,
                merged,
                merged_lse,
                group_heads,
                group_held,
                stride_out_head,
                stride_lse_head,
                DV,
                BLOCK_DV,
            )


def decode_attention(
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
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Attention of at most one query token a request; arguments, result and errors as in `unified_attention`.

    query_start_loc None means that token r belongs to request r. The splits follow each request's length on the device:
    the host reads nothing, so a captured CUDA graph stays right as lengths grow, as long as the addresses hold.

    Raises:
        ValueError: as `unified_attention`, and max_query_len other than 1.
    """
    if max_query_len > 1:
        raise ValueError(f"decode_attention takes one query token a request, got max_query_len={max_query_len}")
    given = plan

    def prepare() -> tuple[AttentionShape, DecodePlan | None]:
        shape = check_attention(
            query, k_pool, v_pool, query_start_loc, seq_lens, block_table, window, softcap, sinks, k_scale, v_scale,
            kv_start, k_tail, v_tail, tail_table, sealed_lens, out, lse,
        )  # fmt: skip
        if shape.tokens == 0 or shape.requests == 0:
            return shape, given
        allowed = {"values_by_slot": v_pool.stride(1) == 1, "whole_pages": shape.page == k_pool.shape[1]}
        if given is None:
            return shape, plan_decode(shape, max_seq_len=max_seq_len, window=window, **allowed)
        return shape, given.for_call(shape, **allowed)

    tensors = (
        query, k_pool, v_pool, query_start_loc, seq_lens, block_table, sinks, k_scale, v_scale, kv_start, k_tail,
        v_tail, tail_table, sealed_lens, out, lse,
    )  # fmt: skip
    # A plan's regime follows from tiles of so many keys: not every step is of a kind of its own.
    longest = cdiv(max_seq_len, REGIME_KEYS)
    call = known_call(prepare, tensors, "decode", longest, scale, window, softcap, given, query.device)
    shape, plan = call.shape, call.plan
    if out is None:
        out = query.new_empty(shape.tokens, shape.query_heads, shape.value_dim)
    if shape.tokens == 0 or shape.requests == 0:
        return out
    k_matrix = v_matrix = None
    block_d, block_dv = shape.channels
    as_bytes = plan.products == "bytes"
    k_elements, v_elements = (
        (k_pool, v_pool) if as_bytes and ASSEMBLY.value else (pool_bytes(k_pool), pool_bytes(v_pool))
    )
    if plan.descriptors:
        k_matrix = pool_matrix(k_elements, keys=plan.block_n, channels=block_d)
        v_matrix = pool_matrix(v_elements, keys=plan.block_n, channels=block_dv)
    programs = plan.programs + shape.requests
    partial_out = query.new_empty(programs, shape.query_heads, shape.value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(programs, shape.query_heads, dtype=torch.float32)

    def rest() -> Launch:
        key_factor, out_factor = (1.0, 1.0) if as_bytes else (pool_factor(k_pool.dtype), pool_factor(v_pool.dtype))
        key_dtype, value_dtype = dot_dtypes(query.dtype, k_pool.dtype, v_pool.dtype)
        tail_dtype, _ = dot_dtypes(query.dtype, query.dtype, query.dtype)
        layout = layout_arguments(
            query, k_elements, v_elements, k_scale, v_scale, out, lse, block_table, k_matrix, v_matrix, k_tail, v_tail,
            tail_table,
        )  # fmt: skip
        numbers = (
            shape.requests,
            plan.programs,
            plan.min_tiles,
            abs(scale) * key_factor * (1.0 if softcap else LOG2_E.value),
            softcap,
            out_factor,
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
            TRANSPOSED=plan.products != "rows",
            BYTES=as_bytes,
            PIECES=plan.pieces,
            SLOTS=plan.slots,
            VALUES_BY_SLOT=v_pool.stride(1) == 1,
            NEGATED=scale < 0,
            TAIL=sealed_lens is not None,
            BLOCK_R=1 if shape.requests == 1 else max(16, next_power_of_2(shape.requests)),
            BLOCK_G=next_power_of_2(shape.group),
            BLOCK_M=plan.query_rows(shape.group),
            BLOCK_N=plan.block_n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_S=plan.merge_splits,
            TEAM=plan.team,
            KEY_DTYPE=key_dtype,
            VALUE_DTYPE=value_dtype,
            TAIL_DTYPE=tail_dtype,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            **({} if plan.registers is None else {"maxnreg": plan.registers}),
            **dependent_launch(query.device),
        )
        return (shape.kv_heads, programs, 1), numbers, constants

    tensors = (
        query, k_elements, v_elements, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse,
        take_counters((programs + shape.requests) * shape.kv_heads, query.device), query_start_loc, seq_lens,
        block_table, kv_start, k_matrix and k_matrix.descriptor, v_matrix and v_matrix.descriptor, k_tail, v_tail,
        tail_table, sealed_lens,
    )  # fmt: skip
    call.launch(_decode_kernel, tensors, rest)
    return out
