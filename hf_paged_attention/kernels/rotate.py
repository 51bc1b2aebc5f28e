"""Queries and keys turned so that eight bits hold them better, their products unchanged.

    q' = (q · f) H,   k' = (k / f) H,   q'·k' = q·k     since H is orthonormal: H Hᵀ = 1

states [N, H, D], factor f [Hkv, D] of powers of two with one row a KV head, H [D, D] a Hadamard matrix on blocks of
the largest power of two that divides D. Grid: tiles of ROWS (token, head) rows of one KV head, times the KV heads.
`write_kv` turns its keys, and the queries that will meet them, on the way; `rotate_heads` turns those that come alone.

H spreads an outlier channel over its block, as QuaRot does (arXiv:2404.00456, section 4); f makes channels alike
before. With factors that are powers of two and a matrix of ±1 the products are exact in bf16, so turning keys adds no
rounding of its own.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from .dependent import dependent_launch, follow
from .integers import cdiv, next_power_of_2
from .launch import TurnPlan, plan_turn


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
def _hadamard_16(BLOCK: tl.constexpr, dtype: tl.constexpr):
    """±1 [16, 16]: the Hadamard matrix of 16, or matrices of BLOCK < 16 on its diagonal and 0 elsewhere.

    Computed, since loading it would cost a program the memory's latency.
    """
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    both = i & j & (BLOCK - 1) if BLOCK < 16 else i & j
    # Minus one to the number of ones of `both`, whose parity is bit `both` of this number.
    signs = tl.where(((0x6996 >> both) & 1) == 1, -1.0, 1.0)
    if BLOCK < 16:
        signs = tl.where(i // BLOCK == j // BLOCK, signs, 0.0)
    return signs.to(dtype)


@triton.jit
def turned_tile(x, BLOCK: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """float32 [ROWS, D]: x [ROWS, D] times the signs of Hadamard matrices of BLOCK on the diagonal.

    A matrix of BLOCK channels is a product of one of 16, for the tensor cores, and of matrices of 2 further up, sums
    and differences. So no program reads D * D signs; and the left operand's rows, (HIGH, ROWS) with HIGH = D / 16, are
    in an order that puts those that are added into one thread's registers: a tile of the tensor cores gives a thread
    two rows, 8 apart, and a warp 16 of each 16 * num_warps. ROWS is a multiple of 8 * num_warps for that.
    """
    ROWS: tl.constexpr = x.shape[0]
    HIGH: tl.constexpr = x.shape[1] // 16
    PAIR: tl.constexpr = 2 if HIGH > 1 else 1
    x = tl.reshape(x, [ROWS // 8, 8, HIGH // PAIR, PAIR, 16])
    x = tl.reshape(tl.permute(x, [2, 0, 3, 1, 4]), [HIGH * ROWS, 16])
    y = tl.dot(x.to(DOT_DTYPE), _hadamard_16(BLOCK, DOT_DTYPE), input_precision="tf32x3")
    y = tl.permute(tl.reshape(y, [HIGH // PAIR, ROWS // 8, PAIR, 8, 16]), [1, 3, 0, 2, 4])
    STEPS: tl.constexpr = (BLOCK >= 32) + (BLOCK >= 64) + (BLOCK >= 128) + (BLOCK >= 256) + (BLOCK >= 512)
    for step in tl.static_range(STEPS):
        y = tl.reshape(y, [ROWS, HIGH // (2 << step), 2, 1 << step, 16])
        a, b = tl.split(tl.permute(y, [0, 1, 3, 4, 2]))
        y = tl.permute(tl.join(a + b, a - b), [0, 1, 4, 2, 3])
    return tl.reshape(y, [ROWS, HIGH * 16])


@triton.jit
def turned_states(
    states_ptr,
    factor_ptr,
    kv_head,
    tokens,
    heads,
    row_held,
    stride_token,
    stride_head,
    D: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """float32 [rows, BLOCK_D]: rows (tokens, heads) of one KV head, turned but for the matrix's norm; 0 past D."""
    d = tl.arange(0, BLOCK_D)
    # Before the states, which pass through shared memory, so that its latency is theirs.
    factor = tl.load(factor_ptr + kv_head * D + d, mask=d < D, other=1.0)
    states_at = states_ptr + (tokens.to(tl.int64) * stride_token + heads * stride_head)[:, None] + d[None, :]
    x = tl.load(states_at, mask=row_held[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    if DIVIDE:
        # The reciprocal of a power of two, exactly: its exponent the other way round.
        factor = (0x7F000000 - factor.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return turned_tile(x * factor[None, :], BLOCK, DOT_DTYPE)


@triton.jit
def rotate_tile(
    states_ptr,
    factor_ptr,
    out_ptr,
    program,
    num_tokens,
    norm,
    stride_token,
    stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DIVIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Turn ROWS rows (token, head) of one KV head into out [N, KV_HEADS * GROUP, D]: program number `program`."""
    kv_head = program % KV_HEADS
    rows = program // KV_HEADS * ROWS + tl.arange(0, ROWS)
    tokens = rows // GROUP
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    held = tokens < num_tokens
    out = turned_states(
        states_ptr, factor_ptr, kv_head, tokens, heads, held, stride_token, stride_head,
        D, DIVIDE, BLOCK, BLOCK_D, DOT_DTYPE,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    out_at = out_ptr + ((tokens.to(tl.int64) * (KV_HEADS * GROUP) + heads) * D)[:, None] + d[None, :]
    tl.store(out_at, (out * norm).to(out_ptr.dtype.element_ty), mask=held[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_kernel(
    states_ptr,
    factor_ptr,
    out_ptr,
    num_tokens,
    norm,
    stride_token,
    stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DIVIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    rotate_tile(
        states_ptr, factor_ptr, out_ptr, tl.program_id(0), num_tokens, norm, stride_token, stride_head,
        KV_HEADS, GROUP, D, DIVIDE, ROWS, BLOCK, BLOCK_D, DOT_DTYPE,
    )  # fmt: skip


@functools.cache
def turn_options(dim: int, dtype: torch.dtype) -> Mapping[str, object]:
    """How `turned_states` turns heads of `dim` channels.

    Products of 16-bit states, power-of-two factors and signs are exact in the states' own type.
    """
    interpreted = triton.knobs.runtime.interpret  # whose dot knows no 16-bit floats
    known = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return {
        "BLOCK": hadamard_block(dim),
        "BLOCK_D": max(16, next_power_of_2(dim)),
        "DOT_DTYPE": tl.float32 if interpreted else known[dtype],
    }


def rotate_heads(
    states: torch.Tensor, factor: torch.Tensor, *, divide: bool, plan: TurnPlan | None = None
) -> torch.Tensor:
    """Turn states `[N, H, D]` (last dimension contiguous) by the factor `[Hkv, D]` of their KV head.

    divide=True for keys (H = Hkv), which come back in float32 to be quantised; False for queries, whose dtype stays.
    """
    tokens, heads, dim = states.shape
    kv_heads = factor.shape[0]
    out = torch.empty_like(states, dtype=torch.float32 if divide else None, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    group = heads // kv_heads
    plan = plan or plan_turn(rows=tokens * heads, head_dim=dim, dtype=states.dtype, device=states.device)
    _rotate_kernel[(cdiv(tokens * group, plan.rows) * kv_heads,)](
        states,
        factor,
        out,
        tokens,
        hadamard_block(dim) ** -0.5,
        states.stride(0),
        states.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        DIVIDE=divide,
        ROWS=plan.rows,
        num_warps=plan.num_warps,
        **turn_options(dim, states.dtype),
        **dependent_launch(states.device),
    )
    return out
