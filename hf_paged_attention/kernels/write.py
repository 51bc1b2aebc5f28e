"""New keys and values into their slots, quantised on the way.

    pool[slot(n), h] = x[n, h] / scale,  scale[slot(n), h] = max_d |x[n, h, d]| / qmax;   x = key (turned) or value

key [N, Hkv, D], value [N, Hkv, Dv], pools [num_blocks, block_size, Hkv, D or Dv], scales [num_blocks, block_size, Hkv].
Grid: tiles of BLOCK_ROWS (token, head) rows; one program writes the keys and the values of its rows. Where values are
transposed in their page (BY_SLOT) the rows are tokens of one head, so that neighbouring slots are written together.
"""

import torch
import triton
import triton.language as tl

from .checks import check_write, strides_or_zeros
from .convert import (
    E4M3_MAX,
    FLOAT,
    INT4,
    INT8,
    INT8_MAX,
    SMALLEST_SCALE,
    encode_e4m3,
    pool_bytes,
    pool_format,
    round_half_even,
)
from .dependent import dependent_launch, follow
from .int4 import store_int4_values
from .launch import plan_write
from .rotate import turn_arguments, turned_rows


@triton.jit
def _store_rows(x, pool_at, scale_at, row_held, held, FORMAT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Rows x [BLOCK_ROWS, D] to pool_at, which with TRANSPOSED is [D, BLOCK_ROWS], as held is."""
    if FORMAT == FLOAT:
        code = x.to(pool_at.dtype.element_ty)
    else:
        x = x.to(tl.float32)
        largest: tl.constexpr = INT8_MAX if FORMAT == INT8 else E4M3_MAX
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), largest), SMALLEST_SCALE)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = tl.minimum(tl.maximum(x, -largest), largest)
        code = round_half_even(x).to(tl.int8) if FORMAT == INT8 else encode_e4m3(x)
        tl.store(scale_at, scale, mask=row_held)
    if TRANSPOSED:
        code = tl.trans(code)
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
    ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Encode rows of values [ROWS, BLOCK_DV] and store them at v_row [ROWS], their scales at scale_at [ROWS]."""
    dv = tl.arange(0, BLOCK_DV)
    if FORMAT == INT4:
        store_int4_values(value, v_row, scale_at, row_held, ROWS, DV, BLOCK_DV)
    elif BY_SLOT:
        held = row_held[None, :] & (dv[:, None] < DV)
        _store_rows(value, v_row[None, :] + dv[:, None] * stride_v_d, scale_at, row_held, held, FORMAT, True)
    else:
        held = row_held[:, None] & (dv[None, :] < DV)
        _store_rows(value, v_row[:, None] + dv[None, :] * stride_v_d, scale_at, row_held, held, FORMAT, False)


@triton.jit
def _write_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    turn_factor_ptr,
    signs_ptr,
    slot_ptr,
    norm,
    num_tokens,
    kv_heads,
    block_size,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
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
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    program = tl.program_id(0).to(tl.int64)
    if BY_SLOT:
        tokens = program // kv_heads * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        heads = program % kv_heads
    else:
        rows = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        tokens = rows // kv_heads
        heads = rows % kv_heads
    slot = tl.load(slot_ptr + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    row_held = slot >= 0
    slot = tl.where(row_held, slot, 0)
    block = slot // block_size
    slot = slot % block_size

    d = tl.arange(0, BLOCK_D)
    held = row_held[:, None] & (d[None, :] < D)
    key_at = key_ptr + tokens * stride_key_token + heads * stride_key_head
    if turn_factor_ptr is not None:
        factor_at = turn_factor_ptr + heads * D + tl.zeros([BLOCK_ROWS], tl.int64)
        key = turned_rows(key_at, factor_at, signs_ptr, norm, row_held, D, True, BLOCK_D, BLOCK_C, DOT_DTYPE)
    else:
        key = tl.load(key_at[:, None] + d[None, :], mask=held, other=0.0)
    k_at = k_ptr + (block * stride_k_block + slot * stride_k_slot + heads * stride_k_head)[:, None]
    ks_at = k_scale_ptr
    if KEY_FORMAT != FLOAT:
        ks_at = k_scale_ptr + block * stride_ks_block + slot * stride_ks_slot + heads * stride_ks_head
    _store_rows(key, k_at + d[None, :] * stride_k_d, ks_at, row_held, held, KEY_FORMAT, False)

    dv = tl.arange(0, BLOCK_DV)
    held = row_held[:, None] & (dv[None, :] < DV)
    value_at = value_ptr + (tokens * stride_value_token + heads * stride_value_head)[:, None] + dv[None, :]
    value = tl.load(value_at, mask=held, other=0.0)
    v_row = v_ptr + block * stride_v_block + slot * stride_v_slot + heads * stride_v_head
    vs_at = v_scale_ptr
    if VALUE_FORMAT != FLOAT:
        vs_at = v_scale_ptr + block * stride_vs_block + slot * stride_vs_slot + heads * stride_vs_head
    store_values(value, v_row, vs_at, row_held, stride_v_d, VALUE_FORMAT, BY_SLOT, BLOCK_ROWS, DV, BLOCK_DV)


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
) -> None:
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

    Raises:
        ValueError: a shape, dtype or stride other than the above, named with its value.
    """
    check_write(key, value, k_pool, v_pool, slot_mapping, k_scale, v_scale, turn_factor)
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    by_slot = v_pool.stride(1) == 1 and v_pool.stride(3) != 1
    plan = plan_write(
        rows=tokens * kv_heads, head_dim=max(head_dim, value.shape[-1]), device=key.device,
        values_by_slot=by_slot, turned=turn_factor is not None,
    )  # fmt: skip
    turn = turn_arguments(head_dim, key.dtype, key.device) if turn_factor is not None else None
    programs = (
        triton.cdiv(tokens, plan.block_rows) * kv_heads if by_slot else triton.cdiv(tokens * kv_heads, plan.block_rows)
    )
    k_bytes, v_bytes = pool_bytes(k_pool), pool_bytes(v_pool)
    _write_kernel[(programs,)](
        key,
        value,
        k_bytes,
        v_bytes,
        k_scale,
        v_scale,
        turn_factor,
        turn.signs if turn else None,
        slot_mapping,
        turn.norm if turn else 1.0,
        tokens,
        kv_heads,
        k_pool.shape[1],
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *k_bytes.stride(),
        *v_bytes.stride(),
        *strides_or_zeros(k_scale, 3),
        *strides_or_zeros(v_scale, 3)[:3],
        D=head_dim,
        DV=value.shape[-1],
        KEY_FORMAT=pool_format(k_pool.dtype).value,
        VALUE_FORMAT=pool_format(v_pool.dtype).value,
        BY_SLOT=by_slot,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_DV=triton.next_power_of_2(value.shape[-1]),
        BLOCK_C=turn.channels if turn else 16,
        DOT_DTYPE=turn.dot_dtype if turn else tl.float32,
        num_warps=plan.num_warps,
        **dependent_launch(key.device),
    )
