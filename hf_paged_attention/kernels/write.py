"""New keys and values into their slots, quantised on the way, and the queries beside them turned.

    pool[slot(n), h] = x[n, h] / scale,  scale[slot(n), h] = max_d |x[n, h, d]| / qmax;   x = key (turned) or value

key [N, Hkv, D], value [N, Hkv, Dv], pools [num_blocks, block_size, Hkv, D or Dv], scales [num_blocks, block_size, Hkv].
Grid: programs for keys, then for values, then for queries, so that they run side by side and each holds few registers.
One program writes tokens of one head, whose neighbouring slots lie together whichever way a page is laid out.
"""

import torch
import triton
import triton.language as tl

from .checks import check_write, strides_or_zeros
from .convert import FLOAT, INT4, encode, pool_bytes, pool_format, quotient, row_scale
from .dependent import dependent_launch, follow
from .int4 import store_int4_values
from .integers import cdiv, next_power_of_2
from .known_calls import Launch, known_call
from .launch import WritePlan, gpu_of, plan_write
from .rotate import hadamard_block, rotate_tile, turn_options, turned_states


@triton.jit
def _store_rows(
    x,
    norm,
    pool_at,
    scale_at,
    row_held,
    held,
    FORMAT: tl.constexpr,
    TURNED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Rows x [ROWS, D], times norm if TURNED, to pool_at."""
    if FORMAT == FLOAT:
        if TURNED:
            x *= norm
        code = x.to(pool_at.dtype.element_ty)
    else:
        x = x.to(tl.float32)
        size = tl.max(tl.abs(x), 1)
        if TURNED:
            size *= norm
        scale = row_scale(size, FORMAT)
        if TURNED:
            # The sums are rounded in an order of the hardware's, so no reference rounds like them anyway.
            x *= (norm / scale)[:, None]
        else:
            x = quotient(x, scale)
        code = encode(x, FORMAT, FLOAT8)
        tl.store(scale_at, scale, mask=row_held)
    if BY_SLOT:
        # In one dimension neighbouring threads store neighbouring rows; of two, Triton 3.6 takes the first for that
        # and 3.9 the last, as it cannot see that the slots follow one another.
        elements: tl.constexpr = x.shape[0] * x.shape[1]
        pool_at = tl.reshape(tl.trans(pool_at), [elements])
        held = tl.reshape(tl.trans(held), [elements])
        code = tl.reshape(tl.trans(code), [elements])
    tl.store(pool_at, code, mask=held)


@triton.jit
def store_values(
    value,
    v_row,
    scale_at,
    row_held,
    stride_v_d,
    FORMAT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    FLOAT8: tl.constexpr,
    ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Encode rows of values [ROWS, BLOCK_DV] and store them at v_row [ROWS], their scales at scale_at [ROWS]."""
    dv = tl.arange(0, BLOCK_DV)
    if FORMAT == INT4:
        store_int4_values(value, v_row, scale_at, row_held, ROWS, DV, BLOCK_DV)
    else:
        held = row_held[:, None] & (dv[None, :] < DV)
        at = v_row[:, None] + dv[None, :] * stride_v_d
        _store_rows(value, 1.0, at, scale_at, row_held, held, FORMAT, False, BY_SLOT, FLOAT8)


@triton.jit
def _slots_of(slot_ptr, tokens, num_tokens, block_size, PAGE_BITS: tl.constexpr):
    """Block and slot of each token, and whether it has one. PAGE_BITS: block_size's logarithm, -1 if it has none."""
    slot = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=-1)
    held = slot >= 0
    # Each thread divides the slots of all its rows: 32 bits, and shifts where they do, save a hundred instructions.
    slot = tl.where(held, slot, 0).to(tl.int32)
    if PAGE_BITS >= 0:
        block = slot >> PAGE_BITS
        slot = slot & ((1 << PAGE_BITS) - 1)
    else:
        block = slot // block_size
        slot = slot % block_size
    return block.to(tl.int64), slot.to(tl.int64), held


# Of the counts, which change from step to step, no kernel of its own need be compiled.
@triton.jit(do_not_specialize=["num_tokens", "key_programs", "value_programs"])
def _write_kernel(
    key_ptr,
    value_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    turn_factor_ptr,
    query_out_ptr,
    slot_ptr,
    norm,
    num_tokens,
    block_size,
    key_programs,
    value_programs,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_query_token,
    stride_query_head,
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
    D: tl.constexpr,
    DV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    FLOAT8: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    QUERY_DOT_DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    program = tl.program_id(0)
    TURNED: tl.constexpr = turn_factor_ptr is not None
    if program < key_programs:
        head = (program % KV_HEADS).to(tl.int64)
        tokens = program // KV_HEADS * KEY_ROWS + tl.arange(0, KEY_ROWS)
        # What is left out is loaded like the rest, so that no load waits for the slots, nor they for a barrier.
        block, slot, held = _slots_of(slot_ptr, tokens, num_tokens, block_size, PAGE_BITS)
        given = tokens < num_tokens
        d = tl.arange(0, BLOCK_D)
        if TURNED:
            key = turned_states(
                key_ptr, turn_factor_ptr, head, tokens, head, given, stride_key_token, stride_key_head,
                D, True, BLOCK, BLOCK_D, DOT_DTYPE,
            )  # fmt: skip
        else:
            key_at = key_ptr + (tokens.to(tl.int64) * stride_key_token + head * stride_key_head)[:, None] + d[None, :]
            key = tl.load(key_at, mask=given[:, None] & (d < D)[None, :], other=0.0)
        k_row = k_ptr + head * stride_k_head + block * stride_k_block + slot * stride_k_slot
        ks_at = k_scale_ptr
        if KEY_FORMAT != FLOAT:
            ks_at = k_scale_ptr + head * stride_ks_head + block * stride_ks_block + slot * stride_ks_slot
        at = k_row[:, None] + d[None, :] * stride_k_d
        stored = held[:, None] & (d < D)[None, :]
        _store_rows(key, norm, at, ks_at, held, stored, KEY_FORMAT, TURNED, False, FLOAT8)
    elif program < key_programs + value_programs:
        program -= key_programs
        head = (program % KV_HEADS).to(tl.int64)
        tokens = program // KV_HEADS * VALUE_ROWS + tl.arange(0, VALUE_ROWS)
        block, slot, held = _slots_of(slot_ptr, tokens, num_tokens, block_size, PAGE_BITS)
        dv = tl.arange(0, BLOCK_DV)
        value_at = (
            value_ptr + (tokens.to(tl.int64) * stride_value_token + head * stride_value_head)[:, None] + dv[None, :]
        )
        value = tl.load(value_at, mask=(tokens < num_tokens)[:, None] & (dv < DV)[None, :], other=0.0)
        v_row = v_ptr + head * stride_v_head + block * stride_v_block + slot * stride_v_slot
        vs_at = v_scale_ptr
        if VALUE_FORMAT != FLOAT:
            vs_at = v_scale_ptr + head * stride_vs_head + block * stride_vs_block + slot * stride_vs_slot
        # A number known when compiling goes into the store, where another is two additions an element.
        step = VALUE_STEP if VALUE_STEP else stride_v_d
        store_values(value, v_row, vs_at, held, step, VALUE_FORMAT, BY_SLOT, FLOAT8, VALUE_ROWS, DV, BLOCK_DV)
    elif query_ptr is not None:
        rotate_tile(
            query_ptr, turn_factor_ptr, query_out_ptr, program - key_programs - value_programs, num_tokens, norm,
            stride_query_token, stride_query_head,
            KV_HEADS, GROUP, D, False, KEY_ROWS, BLOCK, BLOCK_D, QUERY_DOT_DTYPE,
        )  # fmt: skip


def _by_slot(v_pool: torch.Tensor) -> bool:
    """Whether values lie transposed in their page."""
    return v_pool.stride(1) == 1 and v_pool.stride(3) != 1


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    turn_factor: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    plan: WritePlan | None = None,
) -> torch.Tensor | None:
    """Write N new tokens into the pools, in place and in one launch; `reference_write_kv` is its specification.

    Args:
        key: [N, Hkv, D], float32, bfloat16 or float16, any strides with the last dimension contiguous.
        value: [N, Hkv, Dv], as key.
        k_pool: [num_blocks, block_size, Hkv, D], any strides; a float dtype (values are rounded to it), int8
            (symmetric, scale = largest magnitude of a token and head / 127, half to even) or float8_e4m3fn (/ 448).
        v_pool: [num_blocks, block_size, Hkv, Dv], as k_pool; the dtypes may differ. uint8 [..., Dv / 2] for int4.
        slot_mapping: int64 [N], block * block_size + slot of each token; negative to leave it out.
        k_scale, v_scale: float32 [num_blocks, block_size, Hkv], written for 8-bit pools. A token of zeros gets a scale
            that decodes to zeros. v_scale of int4: float16 [num_blocks, block_size, Hkv, 2, groups], as in int4.py.
        turn_factor: float32 [Hkv, D], contiguous: keys are stored turned (kernels/rotate.py), divided by it first.
        query: [N, Hq, D], as key; Hq a multiple of Hkv. With turn_factor only.
        plan: the launch choice, `plan_write`'s where None.

    Returns:
        The query turned to meet the keys, contiguous, of its dtype, as `rotate_heads` does: every token's, whether it
        has a slot or not. None without a query.

    Raises:
        ValueError: a shape, dtype or stride other than the above, named with its value.
    """
    asked = plan

    def prepare() -> tuple[None, WritePlan]:
        check_write(*tensors)
        return None, asked or plan_write(
            rows=key.shape[0] * key.shape[1], head_dim=key.shape[2], value_dim=value.shape[2], dtype=key.dtype,
            device=key.device, values_by_slot=_by_slot(v_pool), turned=turn_factor is not None,
        )  # fmt: skip

    tensors = key, value, k_pool, v_pool, slot_mapping, k_scale, v_scale, turn_factor, query
    call = known_call(prepare, tensors, "write", asked, key.device)
    plan = call.plan
    turned_query = None if query is None else torch.empty_like(query, memory_format=torch.contiguous_format)
    if key.shape[0] == 0:
        return turned_query
    k_bytes, v_bytes = pool_bytes(k_pool), pool_bytes(v_pool)

    def rest() -> Launch:
        tokens, kv_heads, head_dim = key.shape
        block_size = k_pool.shape[1]
        group = 1 if query is None else query.shape[1] // kv_heads
        key_programs = cdiv(tokens, plan.key_rows) * kv_heads
        value_programs = cdiv(tokens, plan.value_rows) * kv_heads
        query_programs = 0 if query is None else cdiv(tokens * group, plan.key_rows) * kv_heads
        turn = turn_options(head_dim, key.dtype)
        if turn_factor is None:
            turn = {**turn, "BLOCK_D": next_power_of_2(head_dim)}
        numbers = (
            hadamard_block(head_dim) ** -0.5,
            tokens,
            block_size,
            key_programs,
            value_programs,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            *strides_or_zeros(query, 3)[:2],
            *k_bytes.stride(),
            *v_bytes.stride(),
            *strides_or_zeros(k_scale, 3),
            *strides_or_zeros(v_scale, 3)[:3],
        )
        constants = dict(
            D=head_dim,
            DV=value.shape[-1],
            KV_HEADS=kv_heads,
            GROUP=group,
            KEY_FORMAT=pool_format(k_pool.dtype).value,
            VALUE_FORMAT=pool_format(v_pool.dtype).value,
            BY_SLOT=_by_slot(v_pool),
            FLOAT8=gpu_of(key.device).float8,
            PAGE_BITS=block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1,
            VALUE_STEP=v_pool.stride(3) if v_pool.stride(3) == block_size else 0,
            KEY_ROWS=plan.key_rows,
            VALUE_ROWS=plan.value_rows,
            BLOCK_DV=next_power_of_2(value.shape[-1]),
            QUERY_DOT_DTYPE=turn_options(head_dim, key.dtype if query is None else query.dtype)["DOT_DTYPE"],
            num_warps=plan.num_warps,
            **turn,
            **dependent_launch(key.device),
        )
        return (key_programs + value_programs + query_programs, 1, 1), numbers, constants

    given = key, value, query, k_bytes, v_bytes, k_scale, v_scale, turn_factor, turned_query, slot_mapping
    call.launch(_write_kernel, given, rest)
    return turned_query
