"""What both attention kernels take beside their tensors, in the order of their parameters."""

from typing import Any

import torch

from .checks import strides_or_zeros
from .pool_descriptors import PoolMatrix


def layout_arguments(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale, v_scale, out: torch.Tensor, lse, block_table,
    k_matrix: PoolMatrix | None, v_matrix: PoolMatrix | None, k_tail, v_tail, tail_table,
) -> tuple[Any, ...]:  # fmt: skip
    """From `stride_q_token` to `stride_tail_table`: where elements lie; zeros for what is None."""
    return (
        query.stride(0),
        query.stride(1),
        *k.stride(),
        *v.stride(),
        *strides_or_zeros(k_scale, 3)[:3],
        *strides_or_zeros(v_scale, 3)[:3],
        out.stride(0),
        out.stride(1),
        *strides_or_zeros(lse, 2),
        block_table.stride(0),
        k_matrix.rows_a_head if k_matrix else 0,
        k_matrix.rows_a_block if k_matrix else 0,
        v_matrix.rows_a_head if v_matrix else 0,
        v_matrix.rows_a_block if v_matrix else 0,
        *strides_or_zeros(k_tail, 4),
        *strides_or_zeros(v_tail, 4),
        0 if tail_table is None else tail_table.stride(0),
    )
