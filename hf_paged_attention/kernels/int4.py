"""Four-bit keys and values (KIVI, arXiv:2402.02750): 4-bit codes with a scale and a zero point a group,

    x ~ code · scale + zero,   zero = min x,  scale = (max x - zero) / 15 over the group,   code in 0 .. 15

A key's group is one channel over 32 consecutive tokens of its block: trained models' keys have channels that are large
in every token. A value's group is 32 channels of one token, the last one shorter where 32 does not divide them.
Scales and zero points are float16: against bfloat16 a channel with a large bias keeps three more bits of it. Larger
magnitudes than float16 holds saturate, and attention with 16-bit queries decodes to float16.

Byte j of a row holds channel 2j in its low and 2j + 1 in its high half, so that a thread that unpacks a byte holds
neighbours. Key scales are [..., block_size / 32, Hkv, 2, D] and value scales [..., Hkv, 2, groups]: scale, then zero.
"""

import torch
import triton
import triton.language as tl

from .convert import ASSEMBLY, round_half_even
from .pages import tile_offsets

GROUP = 32
LARGEST_CODE = tl.constexpr(15.0)
# float16 ends at 65,504, which 15 rounded scales above a zero point must not pass.
LARGEST = tl.constexpr(65408.0)


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
    zero = low.clamp(-LARGEST.value, LARGEST.value).half()
    scale = ((high.clamp(-LARGEST.value, LARGEST.value) - zero.float()) / LARGEST_CODE.value).half()
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
    zero = tl.minimum(tl.maximum(low, -LARGEST), LARGEST).to(tl.float16)
    top = tl.minimum(tl.maximum(high, -LARGEST), LARGEST)
    scale = tl.div_rn(top - zero.to(tl.float32), LARGEST_CODE).to(tl.float16)
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    x = tl.div_rn(x - zero.to(tl.float32), tl.broadcast_to(step, x.shape))
    return round_half_even(tl.minimum(tl.maximum(x, 0.0), LARGEST_CODE)).to(tl.int32), scale, zero


@triton.jit
def pack_tile(codes, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Bytes [ROWS, CHANNELS / 2] of codes [ROWS, CHANNELS]."""
    low, high = tl.split(tl.reshape(codes, [ROWS, CHANNELS // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


# Eight codes in a word, their scales and zero points in four words each, to eight float16 numbers. prmt puts a byte
# into both halves of a register of 1024s, whose last bits are the codes, 16-fold in one; the first fma leaves them.
WORD_TO_FP16 = tl.constexpr(
    "{ .reg .b32 x, one, less; mov.b32 one, 0x2C003C00; mov.b32 less, 0xD400E400;"
    + "".join(
        f"prmt.b32 x, $8, 0x64646464, 0x4{byte}4{byte}; and.b32 x, x, 0xFFF0FF0F; fma.rn.f16x2 x, x, one, less;"
        f"fma.rn.f16x2 x, x, ${9 + byte}, ${13 + byte}; mov.b32 {{${2 * byte}, ${2 * byte + 1}}}, x;"
        for byte in range(4)
    )
    + "}"
)


@triton.jit
def decode_words(words, scale, zero):
    """float16 [ROWS, WORDS, 2, 2, 2] of words [ROWS, WORDS]; scale and zero: four words each, two channels a word."""
    s0, s1, s2, s3 = scale
    z0, z1, z2, z3 = zero
    x0, x1, x2, x3, x4, x5, x6, x7 = tl.inline_asm_elementwise(
        WORD_TO_FP16,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r",
        [words, s0, s1, s2, s3, z0, z1, z2, z3],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    low = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    high = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.join(low, high)


@triton.jit
def unpack_tile(packed):
    """float32 codes [ROWS, CHANNELS] of bytes [ROWS, CHANNELS / 2]."""
    codes = tl.interleave(packed & 15, packed >> 4)
    # 2^23 + code has the code in its low bits: a GPU converts integers at an eighth of the rate of arithmetic.
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def load_bytes(ptr, row_at, held, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Bytes [ROWS, BLOCK_C / 2] of rows of C channels, whose offsets are row_at [ROWS]."""
    byte = tl.arange(0, BLOCK_C // 2)
    return tl.load(ptr + row_at[:, None] + byte[None, :], mask=held[:, None] & (byte < C // 2)[None, :], other=0)


@triton.constexpr_function
def by_words(channels, dtype):
    """Whether a tile in `dtype` is decoded eight codes at a time."""
    return ASSEMBLY and dtype == tl.float16 and channels % 8 == 0


@triton.jit
def load_words(ptr, row_at, held, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Words [ROWS, BLOCK_C / 8] of rows of C channels, whose offsets in bytes are row_at [ROWS]."""
    word = tl.arange(0, BLOCK_C // 8)
    at = ptr.to(tl.pointer_type(tl.int32)) + (row_at // 4)[:, None] + word[None, :]
    return tl.load(at, mask=held[:, None] & (word < C // 8)[None, :], other=0)


@triton.jit
def channel_pairs(
    ptr, group_at, held, D: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A float16 a channel as four int32 [GROUPS * SIZE, BLOCK_D / 8], two channels each; group_at: offsets [GROUPS]."""
    pair = tl.arange(0, BLOCK_D // 2)
    at = ptr.to(tl.pointer_type(tl.int32)) + (group_at // 2)[:, None] + pair[None, :]
    pairs = tl.load(at, mask=held[:, None] & (pair < D // 2)[None, :], other=0)
    pairs = tl.reshape(pairs, [GROUPS, 1, BLOCK_D // 8, 2, 2])
    pairs = tl.broadcast_to(pairs, [GROUPS, SIZE, BLOCK_D // 8, 2, 2])
    even, odd = tl.split(tl.reshape(pairs, [GROUPS * SIZE, BLOCK_D // 8, 2, 2]))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@triton.jit
def group_pairs(ptr, row_at, held, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """A group's scale, and its zero point, in both halves of int32 [ROWS, GROUPS * 4], one a word of eight channels.

    Loaded two groups at a time: what is narrower than 32 bits is not copied ahead of its use.
    """
    half = tl.arange(0, GROUPS)
    at = ptr.to(tl.pointer_type(tl.int32)) + (row_at // 2)[:, None] + half[None, :]
    pairs = tl.reshape(tl.load(at, mask=held[:, None], other=0), [ROWS, 2, GROUPS // 2])
    both = tl.join((pairs & 0xFFFF) * 0x10001, (pairs >> 16 & 0xFFFF) * 0x10001)
    both = tl.reshape(both, [ROWS, 2, GROUPS, 1])
    both = tl.permute(tl.broadcast_to(both, [ROWS, 2, GROUPS, 4]), [0, 2, 3, 1])
    scale, zero = tl.split(both)
    return tl.reshape(scale, [ROWS, GROUPS * 4]), tl.reshape(zero, [ROWS, GROUPS * 4])


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
    keys = first_key + tl.arange(0, BLOCK_N)
    held = (keys >= first_held) & (keys < end) if MASKED else keys >= 0
    groups = first_key + tl.arange(0, GROUPS) * SIZE
    group_held = (groups + SIZE > first_held) & (groups < end) if MASKED else groups >= 0
    if PAGE >= BLOCK_N:
        block = pages + tl.zeros([GROUPS], tl.int64)
    else:
        block = tl.load(table_ptr + groups // PAGE, mask=group_held, other=0).to(tl.int64)
    row_at = tile_offsets(pages, first_key, stride_block, stride_slot, PAGE, BLOCK_N)
    scale_at = block * stride_scale_block + groups % PAGE // SIZE * stride_scale_group
    if by_words(D, dtype):
        words = load_words(k_ptr, row_at, held, D, BLOCK_D)
        scale = channel_pairs(k_scale_ptr, scale_at, group_held, D, GROUPS, SIZE, BLOCK_D)
        zero = channel_pairs(k_scale_ptr + D, scale_at, group_held, D, GROUPS, SIZE, BLOCK_D)
        x = tl.reshape(decode_words(words, scale, zero), [BLOCK_N, BLOCK_D])
    else:
        d = tl.arange(0, BLOCK_D)
        scale_held = group_held[:, None] & (d < D)[None, :]
        at = k_scale_ptr + scale_at[:, None] + d[None, :]
        scale = tl.load(at, mask=scale_held, other=0.0).to(tl.float32)
        zero = tl.load(at + D, mask=scale_held, other=0.0).to(tl.float32)
        x = tl.reshape(unpack_tile(load_bytes(k_ptr, row_at, held, D, BLOCK_D)), [GROUPS, SIZE, BLOCK_D])
        x = tl.reshape(x * scale[:, None, :] + zero[:, None, :], [BLOCK_N, BLOCK_D])
    return x.to(dtype)


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
    GROUPS: tl.constexpr = BLOCK_DV // SIZE
    STORED: tl.constexpr = (DV + 31) // 32
    row_at = tile_offsets(pages, first_key, stride_block, stride_slot, PAGE, BLOCK_N)
    scale_at = tile_offsets(pages, first_key, stride_scale_block, stride_scale_slot, PAGE, BLOCK_N)
    if by_words(DV, dtype) and DV == BLOCK_DV and GROUPS % 2 == 0:
        words = load_words(v_ptr, row_at, held, DV, BLOCK_DV)
        s, z = group_pairs(v_scale_ptr, scale_at, held, BLOCK_N, GROUPS)
        x = tl.reshape(decode_words(words, (s, s, s, s), (z, z, z, z)), [BLOCK_N, BLOCK_DV])
    else:
        group = tl.arange(0, GROUPS)
        at = v_scale_ptr + scale_at[:, None] + group[None, :]
        scale_held = held[:, None] & (group < STORED)[None, :]
        scale = tl.load(at, mask=scale_held, other=0.0).to(tl.float32)
        zero = tl.load(at + STORED, mask=scale_held, other=0.0).to(tl.float32)
        x = tl.reshape(unpack_tile(load_bytes(v_ptr, row_at, held, DV, BLOCK_DV)), [BLOCK_N, GROUPS, SIZE])
        x = tl.reshape(x * scale[:, :, None] + zero[:, :, None], [BLOCK_N, BLOCK_DV])
    return x.to(dtype)


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
