"""Full blocks encoded into the pools of a cache whose keys are int4: "sealed", from the tail and from new tokens.

    pool[table[r, b]] = encode(x[r, b * block_size : (b + 1) * block_size])   for (r, b) in the seals,
    x[r, p] = tail[tail_table[r, p // block_size]][p % block_size]  if p < seq_len - query_len,  else the new token at p

key [N, Hkv, D], value [N, Hkv, Dv], pools, tail and scales as in unified.py. Values are encoded a token at a time, keys
a channel over 32 tokens (int4.py). Grid: (seals times the groups of 32 tokens in a block, KV heads).
"""

import torch
import triton
import triton.language as tl

from .checks import check_seal, strides_or_zeros
from .convert import FLOAT, pool_bytes, pool_format
from .dependent import dependent_launch, follow
from .int4 import GROUP, encode_int4, pack_tile, quantize_keys
from .integers import next_power_of_2
from .launch import gpu_of
from .reference import write_rows
from .write import store_values


@triton.jit
def _seal_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_tail_ptr,
    v_tail_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    tail_table_ptr,
    seal_request_ptr,
    seal_block_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_v_d,
    stride_ks_block,
    stride_ks_group,
    stride_ks_head,
    stride_vs_block,
    stride_vs_slot,
    stride_vs_head,
    stride_kt_block,
    stride_kt_slot,
    stride_kt_head,
    stride_kt_d,
    stride_vt_block,
    stride_vt_slot,
    stride_vt_head,
    stride_vt_d,
    stride_table,
    stride_tail_table,
    D: tl.constexpr,
    DV: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    FLOAT8: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    GROUPS: tl.constexpr = PAGE // SIZE
    seal = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    head = tl.program_id(1).to(tl.int64)
    index = tl.load(seal_block_ptr + seal)
    if index < 0:
        return
    request = tl.load(seal_request_ptr + seal).to(tl.int64)
    query_start = tl.load(query_start_ptr + request)
    old_len = tl.load(seq_lens_ptr + request) - (tl.load(query_start_ptr + request + 1) - query_start)
    slots = group * SIZE + tl.arange(0, SIZE)
    positions = index * PAGE + slots
    is_new = positions >= old_len
    tokens = (query_start + positions - old_len).to(tl.int64)
    block = tl.load(table_ptr + request * stride_table + index).to(tl.int64)
    # A block that no earlier pass began has no entry in the tail.
    in_tail = index * PAGE < old_len
    tail = tl.load(tail_table_ptr + request * stride_tail_table + index, mask=in_tail, other=0).to(tl.int64)

    d = tl.arange(0, BLOCK_D)
    held = (d < D)[None, :]
    new_at = key_ptr + (tokens * stride_key_token + head * stride_key_head)[:, None] + d[None, :]
    tail_at = k_tail_ptr + (tail * stride_kt_block + slots * stride_kt_slot + head * stride_kt_head)[:, None]
    x = tl.load(new_at, mask=held & is_new[:, None], other=0.0).to(tl.float32)
    old = tl.load(tail_at + d[None, :] * stride_kt_d, mask=held & ~is_new[:, None], other=0.0).to(tl.float32)
    x = tl.where(is_new[:, None], x, old)
    codes, scale, zero = encode_int4(x, tl.min(x, 0)[None, :], tl.max(x, 0)[None, :])
    byte = tl.arange(0, BLOCK_D // 2)
    k_at = k_ptr + block * stride_k_block + head * stride_k_head + (slots * stride_k_slot)[:, None] + byte[None, :]
    tl.store(k_at, pack_tile(codes, SIZE, BLOCK_D), mask=(byte < D // 2)[None, :] & (slots >= 0)[:, None])
    scale_at = k_scale_ptr + block * stride_ks_block + group * stride_ks_group + head * stride_ks_head + d
    tl.store(scale_at, tl.reshape(scale, [BLOCK_D]), mask=d < D)
    tl.store(scale_at + D, tl.reshape(zero, [BLOCK_D]), mask=d < D)

    dv = tl.arange(0, BLOCK_DV)
    held = (dv < DV)[None, :]
    new_at = value_ptr + (tokens * stride_value_token + head * stride_value_head)[:, None] + dv[None, :]
    tail_at = v_tail_ptr + (tail * stride_vt_block + slots * stride_vt_slot + head * stride_vt_head)[:, None]
    x = tl.load(new_at, mask=held & is_new[:, None], other=0.0).to(tl.float32)
    old = tl.load(tail_at + dv[None, :] * stride_vt_d, mask=held & ~is_new[:, None], other=0.0).to(tl.float32)
    x = tl.where(is_new[:, None], x, old)
    v_row = v_ptr + block * stride_v_block + slots * stride_v_slot + head * stride_v_head
    vs_at = v_scale_ptr
    if VALUE_FORMAT != FLOAT:
        vs_at = v_scale_ptr + block * stride_vs_block + slots * stride_vs_slot + head * stride_vs_head
    store_values(x, v_row, vs_at, slots >= 0, stride_v_d, VALUE_FORMAT, BY_SLOT, FLOAT8, SIZE, DV, BLOCK_DV)


def seal_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor | None,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    tail_table: torch.Tensor,
    seal_requests: torch.Tensor,
    seal_blocks: torch.Tensor,
) -> None:
    """Encode whole blocks into the pools, in place and in one launch; `reference_seal_kv` is its specification.

    Args:
        key, value: [N, Hkv, D] and [N, Hkv, Dv], the batch's new tokens, last dimension contiguous.
        k_pool, k_scale: int4 keys and their scales, v_pool, v_scale: values of any format, as in `unified_attention`.
        k_tail, v_tail, tail_table: where the tokens of earlier passes are.
        query_start_loc, seq_lens, block_table: as in `unified_attention`.
        seal_requests, seal_blocks: int32 [M]; the request, and the column of its block in the tables. A block of -1 is
            left out, so that a captured graph can decide at every replay.

    Raises:
        ValueError: a shape, dtype or stride other than the above, named with its value.
    """
    check_seal(
        key, value, k_pool, v_pool, k_scale, v_scale, k_tail, v_tail, query_start_loc, seq_lens, block_table,
        tail_table, seal_requests, seal_blocks,
    )  # fmt: skip
    seals, page, kv_heads = seal_blocks.shape[0], k_pool.shape[1], k_pool.shape[2]
    if seals == 0:
        return
    v_bytes = pool_bytes(v_pool)
    _seal_kernel[(seals * (page // GROUP), kv_heads)](
        key,
        value,
        k_pool,
        v_bytes,
        k_scale,
        v_scale,
        k_tail,
        v_tail,
        query_start_loc,
        seq_lens,
        block_table,
        tail_table,
        seal_requests,
        seal_blocks,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *k_pool.stride()[:3],
        *v_bytes.stride(),
        *k_scale.stride()[:3],
        *strides_or_zeros(v_scale, 3)[:3],
        *k_tail.stride(),
        *v_tail.stride(),
        block_table.stride(0),
        tail_table.stride(0),
        D=key.shape[2],
        DV=value.shape[2],
        VALUE_FORMAT=pool_format(v_pool.dtype).value,
        BY_SLOT=v_pool.stride(1) == 1 and v_pool.stride(3) != 1,
        FLOAT8=gpu_of(key.device).float8,
        PAGE=page,
        SIZE=GROUP,
        BLOCK_D=max(2, next_power_of_2(key.shape[2])),
        BLOCK_DV=max(2, next_power_of_2(value.shape[2])),
        num_warps=4,
        **dependent_launch(key.device),
    )


def reference_seal_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor | None,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    tail_table: torch.Tensor,
    seal_requests: torch.Tensor,
    seal_blocks: torch.Tensor,
) -> None:
    """What `seal_kv` does; see there for shapes. Reads the lengths on the host."""
    size = k_pool.shape[1]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, index in zip(seal_requests.tolist(), seal_blocks.tolist(), strict=True):
        if index < 0:
            continue
        old = lengths[row] - (starts[row + 1] - starts[row])
        first = starts[row] + index * size - old  # token of the block's first position, where it is new
        new = slice(max(first, starts[row]), first + size)
        held = size - (new.stop - new.start) if new.stop > new.start else size
        block = int(block_table[row, index])
        keys, values = key[new].float(), value[new].float()
        if held:
            tail = int(tail_table[row, index])
            keys = torch.cat([k_tail[tail, :held].float(), keys[: size - held]])
            values = torch.cat([v_tail[tail, :held].float(), values[: size - held]])
        k_pool[block], k_scale[block] = quantize_keys(keys)
        slots = torch.arange(block * size, (block + 1) * size, device=key.device)
        write_rows(values, v_pool, v_scale, slots)
