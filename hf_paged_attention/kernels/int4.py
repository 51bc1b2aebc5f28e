"""Four-bit keys and values (KIVI, arXiv:2402.02750): 4-bit codes with a scale and a zero point a group,

    x ~ code · scale + zero,   zero = min x,  scale = (max x - zero) / 15 over the group,   code in 0 .. 15

A key's group is one channel over 32 consecutive tokens of its block: trained models' keys have channels that are large
in every token. A value's group is 32 channels of one token, the last one shorter where 32 does not divide them.
Scales and zero points are float16: against bfloat16 a channel with a large bias keeps three more bits of it. Larger
magnitudes than float16 holds saturate.

Byte j of a row holds channel 2j in its low and 2j + 1 in its high half, so that a thread that unpacks a byte holds
neighbours. Key scales are [..., block_size / 32, Hkv, 2, D] and value scales [..., Hkv, 2, groups]: scale, then zero.
"""

import torch
import triton
import triton.language as tl

from .convert import round_half_even
from .pages import tile_offsets

GROUP = 32
LARGEST_CODE = tl.constexpr(15.0)
FP16_MAX = tl.constexpr(65504.0)


def value_groups(dim: int) -> int:
    """Groups of a value of `dim` channels."""
    return -(-dim // GROUP)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes `[..., C]` of 0 .. 15 to bytes `[..., C / 2]`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """What `pack` packed."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _encode(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zero = low.clamp(-FP16_MAX.value, FP16_MAX.value).half()
    scale = ((high.clamp(-FP16_MAX.value, FP16_MAX.value) - zero.float()) / LARGEST_CODE.value).half()
    step = torch.where(scale == 0, 1.0, scale.float())
    codes = ((x - zero.float()) / step).clamp(0, LARGEST_CODE.value).round().to(torch.uint8)
    return codes, scale, zero


def quantize_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes `[..., T, Hkv, D / 2]` and scales `[..., T / 32, Hkv, 2, D]` of keys `[..., T, Hkv, D]`."""
    groups = keys.float().unflatten(-3, (-1, GROUP))
    codes, scale, zero = _encode(groups, groups.amin(-3, keepdim=True), groups.amax(-3, keepdim=True))
    return pack(codes.flatten(-4, -3)), torch.stack([scale.squeeze(-3), zero.squeeze(-3)], -2)


def dequantize_keys(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Keys `[..., T, Hkv, D]` from what `quantize_keys` gives."""
    codes = unpack(packed).to(dtype).unflatten(-3, (-1, GROUP))
    scale, zero = scales.to(dtype).unsqueeze(-4).unbind(-2)
    return (codes * scale + zero).flatten(-4, -3)


def quantize_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes `[..., D / 2]` and scales `[..., 2, groups]` of values `[..., D]`."""
    dim = values.shape[-1]
    groups = value_groups(dim)
    # The last group is filled up with its own last channel, which moves neither end.
    filled = values.float()[..., torch.arange(groups * GROUP, device=values.device).clamp_max(dim - 1)]
    filled = filled.unflatten(-1, (groups, GROUP))
    codes, scale, zero = _encode(filled, filled.amin(-1, keepdim=True), filled.amax(-1, keepdim=True))
    return pack(codes.flatten(-2)[..., :dim]), torch.stack([scale.squeeze(-1), zero.squeeze(-1)], -2)


def dequantize_values(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values `[..., D]` from what `quantize_values` gives."""
    codes = unpack(packed).to(dtype)
    scale, zero = scales.to(dtype).repeat_interleave(GROUP, -1)[..., : codes.shape[-1]].unbind(-2)
    return codes * scale + zero


@triton.jit
def encode_int4(x, low, high):
    """Codes (int32) of x, and the scale and zero point (float16) of its groups, whose ends are `low` and `high`.

    low and high have x's shape but for the grouped dimension, which is 1.
    """
    zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16)
    top = tl.minimum(tl.maximum(high, -FP16_MAX), FP16_MAX)
    scale = tl.div_rn(top - zero.to(tl.float32), LARGEST_CODE).to(tl.float16)
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    x = tl.div_rn(x - zero.to(tl.float32), tl.broadcast_to(step, x.shape))
    return round_half_even(tl.minimum(tl.maximum(x, 0.0), LARGEST_CODE)).to(tl.int32), scale, zero


@triton.jit
def pack_tile(codes, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Bytes [ROWS, CHANNELS / 2] of codes [ROWS, CHANNELS]."""
    low, high = tl.split(tl.reshape(codes, [ROWS, CHANNELS // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack_tile(packed):
    """float32 codes [ROWS, CHANNELS] of bytes [ROWS, CHANNELS / 2]."""
    codes = tl.interleave(packed & 15, packed >> 4)
    # 2^23 + code has the code in its low bits: a GPU converts integers at an eighth of the rate of arithmetic.
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def load_int4_keys(
    k_ptr,
    k_scale_ptr,
    table_ptr,
    pages,
    first_key,
    first_held,
    end,
    stride_block,
    stride_slot,
    stride_scale_block,
    stride_scale_group,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    dtype: tl.constexpr,
):
    """A tile of keys [BLOCK_N, BLOCK_D] in `dtype`. `pages` as `tile_pages` gives them; BLOCK_N is a multiple of 32."""
    SIZE: tl.constexpr = 32
    GROUPS: tl.constexpr = BLOCK_N // SIZE
    d = tl.arange(0, BLOCK_D)
    byte = tl.arange(0, BLOCK_D // 2)
    keys = first_key + tl.arange(0, BLOCK_N)
    at = k_ptr + tile_offsets(pages, first_key, stride_block, stride_slot, PAGE, BLOCK_N)[:, None] + byte[None, :]
    held = ((keys >= first_held) & (keys < end))[:, None] if MASKED else (keys >= 0)[:, None]
    packed = tl.load(at, mask=held & (byte[None, :] < D // 2), other=0)
    groups = first_key + tl.arange(0, GROUPS) * SIZE
    group_held = (groups + SIZE > first_held) & (groups < end) if MASKED else groups >= 0
    if PAGE >= BLOCK_N:
        block = pages + tl.zeros([GROUPS], tl.int64)
    else:
        block = tl.load(table_ptr + groups // PAGE, mask=group_held, other=0).to(tl.int64)
    scale_at = k_scale_ptr + (block * stride_scale_block + groups % PAGE // SIZE * stride_scale_group)[:, None] + d
    scale_held = group_held[:, None] & (d < D)[None, :]
    scale = tl.load(scale_at, mask=scale_held, other=0.0).to(tl.float32)
    zero = tl.load(scale_at + D, mask=scale_held, other=0.0).to(tl.float32)
    x = tl.reshape(unpack_tile(packed), [GROUPS, SIZE, BLOCK_D])
    return tl.reshape(x * scale[:, None, :] + zero[:, None, :], [BLOCK_N, BLOCK_D]).to(dtype)


@triton.jit
def load_int4_values(
    v_ptr,
    v_scale_ptr,
    pages,
    first_key,
    held,
    stride_block,
    stride_slot,
    stride_scale_block,
    stride_scale_slot,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    dtype: tl.constexpr,
):
    """A tile of values [BLOCK_N, BLOCK_DV] in `dtype`; zeros where `held` [BLOCK_N] is not."""
    SIZE: tl.constexpr = 32 if BLOCK_DV >= 32 else BLOCK_DV
    STORED: tl.constexpr = (DV + 31) // 32
    byte = tl.arange(0, BLOCK_DV // 2)
    group = tl.arange(0, BLOCK_DV // SIZE)
    at = v_ptr + tile_offsets(pages, first_key, stride_block, stride_slot, PAGE, BLOCK_N)[:, None] + byte[None, :]
    packed = tl.load(at, mask=held[:, None] & (byte < DV // 2)[None, :], other=0)
    scale_at = (
        v_scale_ptr + tile_offsets(pages, first_key, stride_scale_block, stride_scale_slot, PAGE, BLOCK_N)[:, None]
    )
    scale_held = held[:, None] & (group < STORED)[None, :]
    scale = tl.load(scale_at + group[None, :], mask=scale_held, other=0.0).to(tl.float32)
    zero = tl.load(scale_at + STORED + group[None, :], mask=scale_held, other=0.0).to(tl.float32)
    x = tl.reshape(unpack_tile(packed), [BLOCK_N, BLOCK_DV // SIZE, SIZE])
    return tl.reshape(x * scale[:, :, None] + zero[:, :, None], [BLOCK_N, BLOCK_DV]).to(dtype)


@triton.jit
def store_int4_values(x, pool_at, scale_at, row_held, ROWS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Encode rows x [ROWS, BLOCK_DV] and store them at pool_at [ROWS], their scales at scale_at [ROWS]."""
    SIZE: tl.constexpr = 32 if BLOCK_DV >= 32 else BLOCK_DV
    GROUPS: tl.constexpr = BLOCK_DV // SIZE
    STORED: tl.constexpr = (DV + 31) // 32
    group = tl.arange(0, GROUPS)
    x = tl.reshape(x.to(tl.float32), [ROWS, GROUPS, SIZE])
    inside = group[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :] < DV
    low = tl.min(tl.where(inside, x, float("inf")), 2)
    high = tl.max(tl.where(inside, x, float("-inf")), 2)
    codes, scale, zero = encode_int4(x, low[:, :, None], high[:, :, None])
    byte = tl.arange(0, BLOCK_DV // 2)
    packed = pack_tile(tl.reshape(codes, [ROWS, BLOCK_DV]), ROWS, BLOCK_DV)
    tl.store(pool_at[:, None] + byte[None, :], packed, mask=row_held[:, None] & (byte < DV // 2)[None, :])
    held = row_held[:, None] & (group < STORED)[None, :]
    tl.store(scale_at[:, None] + group[None, :], tl.reshape(scale, [ROWS, GROUPS]), mask=held)
    tl.store(scale_at[:, None] + STORED + group[None, :], tl.reshape(zero, [ROWS, GROUPS]), mask=held)
