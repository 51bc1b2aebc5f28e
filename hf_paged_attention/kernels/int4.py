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
