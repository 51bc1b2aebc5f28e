"""The online softmax over key tiles (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao 2023, arXiv 2307.08691):

    m' = max(m, max_j s_j),  l' = l 2^(m - m') + sum_j 2^(s_j - m'),  acc' = acc 2^(m - m') + sum_j 2^(s_j - m') v_j

with s in units of log2 e, so that the exponential is the hardware's exp2.
"""

import triton
import triton.language as tl

from .convert import FLOAT, INT4, decode_tile
from .int4 import load_int4_keys, load_int4_values
from .pages import tile_offsets, tile_pages

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), with a tanh that neither overflows nor needs a device library."""
    e = tl.exp2(scores * (2.0 * LOG2_E / softcap))
    return softcap - softcap * 2.0 / (e + 1.0)


@triton.jit
def attend_tiles(
    acc,
    row_max,
    row_sum,
    q,
    row_pos,
    first_tile,
    last_tile,
    first_held,
    end,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    scale,
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
    k_row,
    v_row,
    k_block_rows,
    v_block_rows,
    D: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    VALUES_BY_SLOT: tl.constexpr,
):
    """Take the key tiles [first_tile, last_tile) into (acc, row_max, row_sum).

    MASKED: apply causality, the window and the request's first key `first_held`; without it every row sees every key.
    `scale` is not negative, in natural units with a softcap, else already times log2 e. k_desc, v_desc: None, or the
    pools as matrices (`PoolMatrix`), whose rows k_row and v_row are the first of this KV head.
    """
    # One scale a token, which multiplies its column of scores or probabilities.
    KEY_SCALED: tl.constexpr = KEY_FORMAT != FLOAT and KEY_FORMAT != INT4
    VALUE_SCALED: tl.constexpr = VALUE_FORMAT != FLOAT and VALUE_FORMAT != INT4
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    next_pages = tile_pages(table_ptr, first_tile, last_tile, first_held, end, PAGE, BLOCK_N, MASKED)
    for tile in range(first_tile, last_tile):
        first_key = tile * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        held = (keys >= first_held) & (keys < end)
        pages = next_pages.to(tl.int64)
        next_pages = tile_pages(table_ptr, tile + 1, last_tile, first_held, end, PAGE, BLOCK_N, MASKED)
        if KEY_FORMAT == INT4:
            k = tl.trans(
                load_int4_keys(
                    k_ptr,
                    k_scale_ptr,
                    table_ptr,
                    pages,
                    first_key,
                    first_held,
                    end,
                    stride_k_block,
                    stride_k_slot,
                    stride_ks_block,
                    stride_ks_slot,
                    D,
                    PAGE,
                    BLOCK_N,
                    BLOCK_D,
                    MASKED,
                    q.dtype,
                )
            )
        elif k_desc is not None:
            k = tl.trans(k_desc.load([k_row + pages.to(tl.int32) * k_block_rows + first_key % PAGE, 0]))
        else:
            k_offsets = tile_offsets(pages, first_key, stride_k_block, stride_k_slot, PAGE, BLOCK_N)
            k_at = k_ptr + k_offsets[None, :] + d[:, None] * stride_k_d
            if MASKED:
                k = tl.load(k_at, mask=held[None, :] & (d[:, None] < D), other=0)
            elif BLOCK_D != D:
                k = tl.load(k_at, mask=d[:, None] < D, other=0)
            else:
                k = tl.load(k_at)
        s = tl.dot(q, decode_tile(k, KEY_FORMAT, q.dtype), input_precision="tf32x3")
        if KEY_SCALED:
            ks_at = k_scale_ptr + tile_offsets(pages, first_key, stride_ks_block, stride_ks_slot, PAGE, BLOCK_N)
            if MASKED:
                s *= (tl.load(ks_at, mask=held, other=0.0) * scale)[None, :]
            else:
                s *= (tl.load(ks_at) * scale)[None, :]
        elif MASKED or softcap is not None:
            s *= scale
        if softcap is not None:
            s = capped(s, softcap) * LOG2_E
        if MASKED:
            seen = held[None, :] & (keys[None, :] <= row_pos[:, None])
            if WINDOW > 0:
                seen &= keys[None, :] > row_pos[:, None] - WINDOW
            s = tl.where(seen, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A row that has seen no key yet keeps row_max = -inf; -inf - -inf would be NaN.
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(s - safe_max[:, None])
        elif not KEY_SCALED and softcap is None:
            # Scaled after the maximum: one fused multiply-add an element.
            new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
            safe_max = new_max
            p = tl.exp2(s * scale - new_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1))
            safe_max = new_max
            p = tl.exp2(s - new_max[:, None])
        alpha = tl.exp2(row_max - safe_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        if VALUE_FORMAT == INT4:
            v = load_int4_values(
                v_ptr,
                v_scale_ptr,
                pages,
                first_key,
                held if MASKED else keys >= 0,
                stride_v_block,
                stride_v_slot,
                stride_vs_block,
                stride_vs_slot,
                DV,
                PAGE,
                BLOCK_N,
                BLOCK_DV,
                VALUE_DTYPE,
            )
        elif v_desc is not None:
            if VALUES_BY_SLOT:
                v = tl.trans(v_desc.load([v_row + pages.to(tl.int32) * v_block_rows, first_key % PAGE]))
            else:
                v = v_desc.load([v_row + pages.to(tl.int32) * v_block_rows + first_key % PAGE, 0])
            if MASKED and VALUE_FORMAT == FLOAT:
                # Slots never written may hold NaN, and 0 * NaN is NaN. Bytes are never NaN once they are decoded.
                v = tl.where(held[:, None], v, 0.0)
        else:
            v_offsets = tile_offsets(pages, first_key, stride_v_block, stride_v_slot, PAGE, BLOCK_N)
            v_at = v_ptr + v_offsets[:, None] + dv[None, :] * stride_v_d
            if VALUES_BY_SLOT and PAGE < BLOCK_N:
                # Slots of a page follow one another, which the compiler cannot see through the table.
                v_at = tl.max_contiguous(tl.multiple_of(v_at, (PAGE, 1)), (PAGE, 1))
            if MASKED:
                v = tl.load(v_at, mask=held[:, None] & (dv[None, :] < DV), other=0)
            elif BLOCK_DV != DV:
                v = tl.load(v_at, mask=dv[None, :] < DV, other=0)
            else:
                v = tl.load(v_at)
        if VALUE_SCALED:
            vs_at = v_scale_ptr + tile_offsets(pages, first_key, stride_vs_block, stride_vs_slot, PAGE, BLOCK_N)
            if MASKED:
                p *= tl.load(vs_at, mask=held, other=0.0)[None, :]
            else:
                p *= tl.load(vs_at)[None, :]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(VALUE_DTYPE), decode_tile(v, VALUE_FORMAT, VALUE_DTYPE), acc, input_precision="tf32x3")
        row_max = new_max
    return acc, row_max, row_sum
