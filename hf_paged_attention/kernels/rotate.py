"""Queries and keys turned so that eight bits hold them better, their products unchanged.

    q' = (q · f) H,   k' = (k / f) H,   q'·k' = q·k     since H is orthonormal: H Hᵀ = 1

states [N, H, D], factor f [Hkv, D] of powers of two with one row a KV head, H [D, D] a Hadamard matrix on blocks of
the largest power of two that divides D. Grid: tiles of BLOCK_ROWS (token, head) rows. `turned_rows` also serves the
kernels that write keys and that attend with one query, which turn on the way.

H spreads an outlier channel over its block, as QuaRot does (arXiv:2404.00456, section 4); f makes channels alike
before. With factors that are powers of two and a matrix of ±1 the products are exact in bf16, so turning keys adds no
rounding of its own.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent import dependent_launch, follow


@functools.cache
def hadamard_signs(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """±1 (0 between blocks) `[dim, dim]`; divided by the square root of `hadamard_block(dim)` it is orthonormal."""
    signs = torch.ones(1, 1)
    while signs.shape[0] < hadamard_block(dim):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)], 0)
    return torch.block_diag(*[signs] * (dim // signs.shape[0])).to(device, dtype)


def hadamard_block(dim: int) -> int:
    """The largest power of two that divides `dim`."""
    return dim & -dim


def reference_rotate_heads(states: torch.Tensor, factor: torch.Tensor, *, divide: bool) -> torch.Tensor:
    """What `rotate_heads` computes, in float32 (float64 for float64 states)."""
    wide = torch.promote_types(states.dtype, torch.float32)
    tokens, heads, dim = states.shape
    grouped = states.to(wide).reshape(tokens, factor.shape[0], -1, dim)
    scaled = grouped / factor.unsqueeze(1) if divide else grouped * factor.unsqueeze(1)
    turned = scaled @ hadamard_signs(dim, wide, states.device) / hadamard_block(dim) ** 0.5
    return turned.reshape(tokens, heads, dim)


def unrotate_heads(turned: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The float32 keys `[N, Hkv, D]` that `reference_rotate_heads(..., divide=True)` turned: H is symmetric."""
    dim = turned.shape[-1]
    signs = hadamard_signs(dim, turned.dtype, turned.device)
    return turned @ signs / hadamard_block(dim) ** 0.5 * factor


@triton.jit
def turned_rows(
    states_at,
    factor_at,
    signs_ptr,
    norm,
    row_held,
    D: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """float32 [rows, BLOCK_D]: the rows at states_at [rows], turned by those at factor_at [rows]; 0 past D.

    BLOCK_C channels of the states at a time, so that the matrix of a large head passes through shared memory in parts.
    Fewer rows than the 16 of a tensor core's tile are filled up with zeros, which are summed away again.
    """
    ROWS: tl.constexpr = row_held.shape[0]
    FILLED: tl.constexpr = 16 // ROWS if ROWS < 16 else 1
    columns = tl.arange(0, BLOCK_D)
    out = tl.zeros([ROWS * FILLED, BLOCK_D], tl.float32)
    for start in tl.static_range(0, BLOCK_D, BLOCK_C):
        d = start + tl.arange(0, BLOCK_C)
        held = row_held[:, None] & (d < D)[None, :]
        x = tl.load(states_at[:, None] + d[None, :], mask=held, other=0.0).to(tl.float32)
        f = tl.load(factor_at[:, None] + d[None, :], mask=held, other=1.0)
        if DIVIDE:
            # The reciprocal of a power of two, exactly: its exponent the other way round.
            f = (0x7F000000 - f.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        x *= f
        if FILLED > 1:
            first = tl.arange(0, FILLED)[:, None, None] == 0
            x = tl.reshape(tl.where(first, x[None, :, :], 0.0), [ROWS * FILLED, BLOCK_C])
        x = x.to(DOT_DTYPE)
        signs_held = (d < D)[:, None] & (columns < D)[None, :]
        signs = tl.load(signs_ptr + d[:, None] * D + columns[None, :], mask=signs_held, other=0.0).to(DOT_DTYPE)
        out = tl.dot(x, signs, out, input_precision="tf32x3")
    if FILLED > 1:
        out = tl.sum(tl.reshape(out, [FILLED, ROWS, BLOCK_D]), 0)
    return out * norm


@triton.jit
def _rotate_kernel(
    states_ptr,
    factor_ptr,
    signs_ptr,
    out_ptr,
    num_rows,
    heads,
    norm,
    stride_token,
    stride_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_held = rows < num_rows
    head = rows % heads
    states_at = states_ptr + (rows // heads).to(tl.int64) * stride_token + head * stride_head
    factor_at = factor_ptr + head // GROUP * D
    out = turned_rows(states_at, factor_at, signs_ptr, norm, row_held, D, DIVIDE, BLOCK_D, BLOCK_C, DOT_DTYPE)
    d = tl.arange(0, BLOCK_D)
    out_at = out_ptr + rows.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_held[:, None] & (d < D)[None, :])


@dataclass(frozen=True)
class TurnArguments:
    """What `turned_rows` needs beside the states, for heads of `dim` channels."""

    signs: torch.Tensor
    norm: float
    channels: int  # BLOCK_C
    dot_dtype: tl.dtype


@functools.cache
def turn_arguments(dim: int, dtype: torch.dtype, device: torch.device) -> TurnArguments:
    """For states of `dtype`. Products of 16-bit states, power-of-two factors and signs are exact in their own type."""
    interpreted = triton.knobs.runtime.interpret  # whose dot knows no 16-bit floats
    dot_dtype = torch.float32 if interpreted else dtype
    known = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    channels = min(64, max(16, triton.next_power_of_2(dim)))
    return TurnArguments(
        hadamard_signs(dim, dot_dtype, device), hadamard_block(dim) ** -0.5, channels, known[dot_dtype]
    )


def rotate_heads(states: torch.Tensor, factor: torch.Tensor, *, divide: bool) -> torch.Tensor:
    """Turn states `[N, H, D]` (last dimension contiguous) by the factor `[Hkv, D]` of their KV head.

    divide=True for keys (H = Hkv), which come back in float32 to be quantised; False for queries, whose dtype stays.
    """
    tokens, heads, dim = states.shape
    out = torch.empty_like(states, dtype=torch.float32 if divide else None, memory_format=torch.contiguous_format)
    rows = tokens * heads
    if not rows:
        return out
    turn = turn_arguments(dim, states.dtype, states.device)
    block_rows = 16 if rows <= 4096 or turn.dot_dtype == tl.float32 else 64
    _rotate_kernel[(triton.cdiv(rows, block_rows),)](
        states,
        factor,
        turn.signs,
        out,
        rows,
        heads,
        turn.norm,
        states.stride(0),
        states.stride(1),
        GROUP=heads // factor.shape[0],
        D=dim,
        DIVIDE=divide,
        BLOCK_ROWS=block_rows,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_C=turn.channels,
        DOT_DTYPE=turn.dot_dtype,
        **dependent_launch(states.device),
    )
    return out
