"""The online softmax over key tiles with keys and values as the left operands, for few query rows:

    S^T = K q^T,   P^T = 2^(S^T - m),   acc^T = acc^T 2^(m - m') + V^T P^T

A decode step has as many query rows as a group has heads; as the left operand they would fill a quarter of the smallest
tensor core tile, and leave Hopper's wide one, which takes 64 rows from where they lie in shared memory, to prefill.

With BYTES the pool's 8-bit elements are the operands. The query and the probabilities become sums of 8-bit pieces
(`split_bytes`), each a column of the right operand, where a group leaves columns free anyway. So a tile crosses shared
memory twice, as a 16-bit tile does, not six times as one that is converted on the way: that, not the memory, is what
bounds a kernel that converts. The tensor cores sum int8 exactly.
"""

import triton
import triton.language as tl

from .convert import (
    E4M3,
    E4M3_MAX,
    FLOAT,
    INT4,
    INT8,
    INT8_MAX,
    INT8_RADIX,
    decode_tile,
    piece_weight,
    split_bytes,
)
from .int4 import load_int4_keys, load_int4_values
from .pages import tile_offsets, tile_pages
from .softmax import LOG2_E, capped

# Two to this power is what a scale of 1e-30 is.
SMALLEST_LOG_SCALE = tl.constexpr(-100.0)


@triton.jit
def column_pieces(SLOTS: tl.constexpr, G: tl.constexpr):
    """Which piece column (slot // 2, head, slot % 2) holds."""
    columns = tl.arange(0, SLOTS * G)
    return columns // (2 * G) * 2 + columns % 2


@triton.jit
def query_columns(q, FORMAT: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The right operand [D, SLOTS * G] of q [G, D] in 8-bit pieces, and the factor [G] that it was divided by.

    Column (slot // 2, head, slot % 2): the accumulator of a tensor core then holds the pieces of a head in one thread.
    """
    largest: tl.constexpr = INT8_MAX if FORMAT == INT8 else E4M3_MAX
    q = q.to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(q), 1) / largest, 1e-30)
    x = q / factor[:, None]
    x = tl.broadcast_to(x[None, :, None, :], [SLOTS // 2, G, 2, D])
    pieces = split_bytes(tl.reshape(x, [SLOTS * G, D]), column_pieces(SLOTS, G)[:, None], FORMAT, PIECES)
    return tl.trans(pieces), factor


@triton.jit
def gather_pieces(
    product, FORMAT: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr
):
    """[ROWS, G] of a product with `query_columns`' column order, [ROWS, SLOTS * G]."""
    high: tl.constexpr = SLOTS // 2
    slot = tl.arange(0, high)[None, :, None, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    parts = tl.reshape(product, [ROWS, high, G, 2])
    if FORMAT == INT8 and PIECES == 2:
        # One conversion instead of two: 512 products of 128 * 127, times 255, are still below 2^31.
        parts = tl.where(slot == 0, parts * 254, parts)
        return tl.sum(tl.sum(parts, 3), 1).to(tl.float32) * (1.0 / INT8_RADIX)
    else:
        return tl.sum(tl.sum(parts.to(tl.float32) * piece_weight(slot, FORMAT), 3), 1)


@triton.jit
def attend_tiles_transposed(
    acc,
    row_max,
    row_sum,
    q,
    q_factor,
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
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    SLOTS: tl.constexpr,
    G: tl.constexpr,
    VALUES_BY_SLOT: tl.constexpr,
):
    """Take the key tiles [first_tile, last_tile) into acc [BLOCK_DV, G], row_max [G] and row_sum [BLOCK_N, G].

    q [BLOCK_D, columns], already in the type of the product. row_sum stays apart a key of the tile: the sum over keys
    crosses warps, and once at the end is enough. A pool's block_size must be PAGE: no load is masked by its keys.
    With BYTES, which is for keys and values in one format, row_max is that of s + log2(value scale), what the product
    with the values needs; a sum is then at most 2^100 a key, for a scale of 1e-30.
    """
    # One scale a token, which multiplies its row of scores or probabilities.
    KEY_SCALED: tl.constexpr = KEY_FORMAT != FLOAT and KEY_FORMAT != INT4
    VALUE_SCALED: tl.constexpr = VALUE_FORMAT != FLOAT and VALUE_FORMAT != INT4
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    next_pages = tile_pages(table_ptr, first_tile, last_tile, first_held, end, PAGE, BLOCK_N, MASKED)
    # One tile or two are masked: no pipeline is worth its registers there.
    for tile in tl.range(first_tile, last_tile, num_stages=1 if MASKED else None):
        first_key = tile * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        held = (keys >= first_held) & (keys < end)
        pages = next_pages.to(tl.int64)
        next_pages = tile_pages(table_ptr, tile + 1, last_tile, first_held, end, PAGE, BLOCK_N, MASKED)
        if KEY_FORMAT == INT4:
            k = load_int4_keys(
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
        elif k_desc is not None:
            k = k_desc.load([k_row + pages.to(tl.int32) * k_block_rows + first_key % PAGE, 0])
        else:
            k_offsets = tile_offsets(pages, first_key, stride_k_block, stride_k_slot, PAGE, BLOCK_N)
            k_at = k_ptr + k_offsets[:, None] + d[None, :] * stride_k_d
            k = (
                tl.load(k_at, mask=d[None, :] < D, other=0.0)
                if BLOCK_D != D
                else tl.load(k_at, eviction_policy="evict_first")
            )
        if BYTES:
            if KEY_FORMAT == E4M3:
                k = k.to(tl.float8e4nv, bitcast=True)
            s = tl.dot(k, q, out_dtype=tl.float32 if KEY_FORMAT == E4M3 else tl.int32)
            s = gather_pieces(s, KEY_FORMAT, PIECES, SLOTS, G, BLOCK_N) * (q_factor * scale)[None, :]
        else:
            s = tl.dot(decode_tile(k, KEY_FORMAT, q.dtype), q, input_precision="tf32x3") * scale
        if KEY_SCALED:
            s *= tl.load(k_scale_ptr + tile_offsets(pages, first_key, stride_ks_block, stride_ks_slot, PAGE, BLOCK_N))[
                :, None
            ]
        if VALUE_SCALED:
            value_scale = tl.load(
                v_scale_ptr + tile_offsets(pages, first_key, stride_vs_block, stride_vs_slot, PAGE, BLOCK_N)
            )
        if softcap is not None:
            s = capped(s, softcap) * LOG2_E
        if MASKED:
            s = tl.where(held[:, None], s, float("-inf"))
            if VALUE_SCALED:
                # Of slots never written.
                value_scale = tl.where(held, value_scale, 1.0)
        t = s
        if BYTES:
            t += tl.maximum(tl.log2(value_scale), SMALLEST_LOG_SCALE)[:, None]
        tile_max = tl.max(t, 0)
        new_max = tl.maximum(row_max, tile_max)
        # A row that has seen no key yet keeps row_max = -inf; -inf - -inf would be NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - safe_max[None, :])
        alpha = tl.exp2(row_max - safe_max)
        row_sum = row_sum * alpha[None, :] + p
        if VALUE_FORMAT == INT4:
            v = tl.trans(
                load_int4_values(
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
            )
        elif v_desc is not None:
            if VALUES_BY_SLOT:
                v = v_desc.load([v_row + pages.to(tl.int32) * v_block_rows, first_key % PAGE])
            else:
                v = tl.trans(v_desc.load([v_row + pages.to(tl.int32) * v_block_rows + first_key % PAGE, 0]))
        else:
            v_offsets = tile_offsets(pages, first_key, stride_v_block, stride_v_slot, PAGE, BLOCK_N)
            v_at = v_ptr + v_offsets[None, :] + dv[:, None] * stride_v_d
            if BYTES and PAGE < BLOCK_N:
                # Slots of a page follow one another, which the compiler cannot see through the table.
                v_at = tl.max_contiguous(tl.multiple_of(v_at, (1, PAGE)), (1, PAGE))
            v = (
                tl.load(v_at, mask=dv[:, None] < DV, other=0.0)
                if BLOCK_DV != DV
                else tl.load(v_at, eviction_policy="evict_first")
            )
        if MASKED and VALUE_FORMAT != INT8 and VALUE_FORMAT != INT4:
            # Slots never written may hold NaN, and 0 * NaN is NaN.
            if VALUE_FORMAT == E4M3:
                v = tl.where(held[None, :], v.to(tl.uint8, bitcast=True), 0)
            else:
                v = tl.where(held[None, :], v, 0.0)
        acc = acc * alpha[None, :]
        if BYTES:
            largest: tl.constexpr = INT8_MAX if VALUE_FORMAT == INT8 else E4M3_MAX
            safe_tile_max = tl.where(tile_max == float("-inf"), 0.0, tile_max)
            x = tl.exp2(t - safe_tile_max[None, :]) * largest
            x = tl.broadcast_to(x[:, None, :, None], [BLOCK_N, SLOTS // 2, G, 2])
            x = tl.reshape(x, [BLOCK_N, SLOTS * G])
            # Chosen after the reshape: a product whose operand is a reshape does not compile on Triton 3.6.
            x = split_bytes(x, column_pieces(SLOTS, G)[None, :], VALUE_FORMAT, PIECES)
            if VALUE_FORMAT == E4M3:
                v = v.to(tl.float8e4nv, bitcast=True)
            o = tl.dot(v, x, out_dtype=tl.float32 if VALUE_FORMAT == E4M3 else tl.int32)
            o = gather_pieces(o, VALUE_FORMAT, PIECES, SLOTS, G, BLOCK_DV)
            acc += o * (tl.exp2(safe_tile_max - safe_max) / largest)[None, :]
        else:
            if VALUE_SCALED:
                p *= value_scale[:, None]
            if VALUE_FORMAT == E4M3:
                v = v.to(tl.uint8, bitcast=True)
            acc = tl.dot(decode_tile(v, VALUE_FORMAT, VALUE_DTYPE), p.to(VALUE_DTYPE), acc, input_precision="tf32x3")
        row_max = new_max
    return acc, row_max, row_sum
