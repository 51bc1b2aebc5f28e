"""One attention output from those over disjoint sets of keys (FlashDecoding).

    lse = log sum_s e^lse_s,   out = sum_s e^(lse_s - lse) out_s

partial_out [S, N, Hq, Dv], out [N, Hq, Dv]; partial_lse [S, N, Hq], lse [N, Hq]: natural logarithms, -inf for no key.
Grid: tiles of BLOCK_M of the N * Hq rows.
"""

import torch
import triton
import triton.language as tl

from .integers import cdiv, next_power_of_2
from .softmax import LN_2, LOG2_E


@triton.jit
def merge_partials(
    partial_out_ptr,
    partial_lse_ptr,
    first,
    step,
    count,
    stride_split,
    rows,
    row_held,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Output [BLOCK_M, BLOCK_DV] and log-sum-exp [BLOCK_M] of `rows` over the `count` splits first, first + step, ...

    partial_out [C, stride_split, DV] and partial_lse [C, stride_split] are contiguous. BLOCK_S splits are read at once:
    one at a time, each would wait for memory. Loads bypass L1, which does not see what other SMs wrote in this launch.
    """
    dv = tl.arange(0, BLOCK_DV)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(0, count, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        at = (first + splits * step).to(tl.int64)[:, None] * stride_split + rows[None, :]
        held = (splits < count)[:, None] & row_held[None, :]
        lse = tl.load(partial_lse_ptr + at, mask=held, other=float("-inf"), cache_modifier=".cg") * LOG2_E
        out = tl.load(
            partial_out_ptr + at[:, :, None] * DV + dv[None, None, :],
            mask=held[:, :, None] & (dv < DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        ).to(tl.float32)
        # A select after the load, not its mask: else the load would wait for that of the log-sum-exps.
        out = tl.where((lse > float("-inf"))[:, :, None], out, 0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - safe_max)
        weight = tl.exp2(lse - safe_max[None, :])
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * out, 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    return acc / total[:, None], tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(total)) * LN_2)


@triton.jit
def _merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    num_rows,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    held = rows < num_rows
    dv = tl.arange(0, BLOCK_DV)
    out, lse = merge_partials(
        partial_out_ptr, partial_lse_ptr, 0, 1, num_splits, num_rows, rows, held, DV, BLOCK_M, BLOCK_S, BLOCK_DV
    )
    out_at = out_ptr + rows.to(tl.int64)[:, None] * DV + dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=held[:, None] & (dv < DV)[None, :])
    tl.store(lse_ptr + rows, lse, mask=held)


def merge_splits(partial_out: torch.Tensor, partial_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over S disjoint sets of keys; `reference_merge_splits` is its specification.

    Args:
        partial_out: [S, N, Hq, Dv], contiguous, any float dtype.
        partial_lse: float32 [S, N, Hq], contiguous, natural log-sum-exps; -inf where a set is empty, its output unread.

    Returns:
        The output [N, Hq, Dv] in partial_out's dtype and float32 log-sum-exp [N, Hq]; zeros and -inf where all are
        empty.

    Raises:
        ValueError: shapes that do not agree, or tensors that are not contiguous.
    """
    if partial_out.dim() != 4 or partial_lse.shape != partial_out.shape[:3]:
        raise ValueError(
            "partial_out must be [splits, tokens, heads, head_dim] and partial_lse the same without head_dim, got "
            f"{list(partial_out.shape)} and {list(partial_lse.shape)}"
        )
    if not (partial_out.is_contiguous() and partial_lse.is_contiguous()):
        raise ValueError("partial_out and partial_lse must be contiguous")
    splits, tokens, heads, dim = partial_out.shape
    out = partial_out.new_empty(tokens, heads, dim)
    lse = partial_lse.new_empty(tokens, heads)
    if tokens:
        block_m = 4
        _merge_kernel[(cdiv(tokens * heads, block_m),)](
            partial_out,
            partial_lse,
            out,
            lse,
            splits,
            tokens * heads,
            DV=dim,
            BLOCK_M=block_m,
            BLOCK_S=min(16, next_power_of_2(splits)),
            BLOCK_DV=next_power_of_2(dim),
        )
    return out, lse
