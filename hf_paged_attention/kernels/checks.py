"""What a call must hold before a kernel runs: every message names the argument and the value it got."""

from dataclasses import dataclass

import torch
import triton

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD_DIM = 512
MIN_BLOCK_SIZE = 16


@dataclass(frozen=True)
class AttentionShape:
    """The sizes and dtypes that a launch is planned from."""

    tokens: int
    requests: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page: int
    query_dtype: torch.dtype
    pool_dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def quantized(self) -> bool:
        return self.pool_dtype in QUANTIZED_DTYPES


def strides_or_zeros(tensor: torch.Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_ints(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    _require(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
    _require(tuple(tensor.shape) == shape, f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    _require(tensor.numel() == 0 or tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension")


def check_scales(k_pool: torch.Tensor, v_pool: torch.Tensor, k_scale, v_scale) -> None:
    """8-bit pools come with float32 scales [num_blocks, block_size, Hkv], others without.

    Raises:
        ValueError: scales missing, superfluous, or of another shape or dtype.
    """
    for name, pool, scales in (("k_scale", k_pool, k_scale), ("v_scale", v_pool, v_scale)):
        if pool.dtype in QUANTIZED_DTYPES:
            _require(scales is not None, f"{name} is needed for a pool of {pool.dtype}, got None")
            _require(scales.dtype == torch.float32, f"{name} must be float32, got {scales.dtype}")
            _require(
                scales.shape == pool.shape[:3],
                f"{name} must have shape {list(pool.shape[:3])}, got {list(scales.shape)}",
            )
        else:
            _require(scales is None, f"{name} belongs to int8 and float8_e4m3fn pools; this pool is {pool.dtype}")


def check_turn_factor(turn_factor: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """The factor of turned keys is contiguous float32 [Hkv, D].

    Raises:
        ValueError: it is not.
    """
    _require(
        turn_factor.shape == (kv_heads, head_dim)
        and turn_factor.dtype == torch.float32
        and turn_factor.is_contiguous(),
        f"turn_factor must be contiguous float32 [{kv_heads}, {head_dim}], got {turn_factor.dtype} "
        f"{list(turn_factor.shape)}",
    )


def check_attention(
    query, k_pool, v_pool, query_start_loc, seq_lens, block_table, window, softcap, sinks, k_scale, v_scale, kv_start,
    out, lse,
) -> AttentionShape:  # fmt: skip
    """The sizes of an attention call.

    Raises:
        ValueError: an argument whose shape, dtype or stride no kernel takes.
    """
    _require(query.dim() == 3, f"query must be [tokens, heads, head_dim], got shape {list(query.shape)}")
    _require(query.dtype in QUERY_DTYPES, f"query must be float32, bfloat16 or float16, got {query.dtype}")
    _require(query.numel() == 0 or query.stride(-1) == 1, f"query must be contiguous in head_dim, got {query.stride()}")
    _require(
        k_pool.dim() == 4 and v_pool.dim() == 4 and k_pool.shape[:3] == v_pool.shape[:3],
        "k_pool and v_pool must be [num_blocks, block_size, kv_heads, head_dim] and agree but for head_dim, got "
        f"{list(k_pool.shape)} and {list(v_pool.shape)}",
    )
    _require(
        k_pool.dtype == v_pool.dtype and k_pool.dtype in QUERY_DTYPES + QUANTIZED_DTYPES,
        f"k_pool and v_pool must both be float32, bfloat16, float16, int8 or float8_e4m3fn, got {k_pool.dtype} and "
        f"{v_pool.dtype}",
    )
    tokens, query_heads, head_dim = query.shape
    _, block_size, kv_heads, value_dim = v_pool.shape
    _require(k_pool.shape[3] == head_dim, f"k_pool must have the query's head_dim {head_dim}, got {list(k_pool.shape)}")
    _require(
        max(head_dim, value_dim) <= MAX_HEAD_DIM,
        f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim} (keys) and {value_dim} (values)",
    )
    _require(query_heads % kv_heads == 0, f"query heads must be a multiple of kv_heads {kv_heads}, got {query_heads}")
    requests = seq_lens.shape[0]
    _check_ints("seq_lens", seq_lens, (requests,))
    _check_ints("block_table", block_table, (requests, block_table.shape[-1]))
    if query_start_loc is not None:
        _check_ints("query_start_loc", query_start_loc, (requests + 1,))
    if kv_start is not None:
        _check_ints("kv_start", kv_start, (requests,))
    page = block_size
    if block_table.shape[1] == 1:
        # Every key is in the one block: any power of two that covers it indexes alike.
        page = max(triton.next_power_of_2(block_size), MIN_BLOCK_SIZE)
    _require(
        page >= MIN_BLOCK_SIZE and page & (page - 1) == 0,
        f"block_size must be a power of two of at least {MIN_BLOCK_SIZE}, got {block_size}",
    )
    _require(window is None or window > 0, f"window must be positive or None, got {window}")
    _require(softcap is None or softcap > 0, f"softcap must be positive or None, got {softcap}")
    _require(
        sinks is None or (sinks.shape == (query_heads,) and sinks.is_contiguous()),
        f"sinks must be contiguous, one a query head [{query_heads}]",
    )
    check_scales(k_pool, v_pool, k_scale, v_scale)
    if out is not None:
        _require(
            out.shape == (tokens, query_heads, value_dim) and out.dtype == query.dtype,
            f"out must be {query.dtype} [{tokens}, {query_heads}, {value_dim}], got {out.dtype} {list(out.shape)}",
        )
        _require(out.numel() == 0 or out.stride(-1) == 1, "out must be contiguous in its last dimension")
    if lse is not None:
        _require(
            lse.shape == (tokens, query_heads) and lse.dtype == torch.float32,
            f"lse must be float32 [{tokens}, {query_heads}], got {lse.dtype} {list(lse.shape)}",
        )
    return AttentionShape(
        tokens, requests, query_heads, kv_heads, head_dim, value_dim, page, query.dtype, k_pool.dtype, query.device
    )


def check_write(key, value, k_pool, v_pool, slot_mapping, k_scale, v_scale, turn_factor) -> None:
    """Sizes of a write.

    Raises:
        ValueError: an argument whose shape, dtype or stride the kernel does not take.
    """
    for name, new, pool_name, pool in (("key", key, "k_pool", k_pool), ("value", value, "v_pool", v_pool)):
        _require(new.dim() == 3, f"{name} must be [tokens, kv_heads, head_dim], got shape {list(new.shape)}")
        _require(new.dtype in QUERY_DTYPES, f"{name} must be float32, bfloat16 or float16, got {new.dtype}")
        _require(new.numel() == 0 or new.stride(-1) == 1, f"{name} must be contiguous in head_dim, got {new.stride()}")
        _require(
            pool.dim() == 4 and pool.shape[2:] == new.shape[1:],
            f"{pool_name} must be [num_blocks, block_size, {new.shape[1]}, {new.shape[2]}], got {list(pool.shape)}",
        )
    _require(
        k_pool.dtype == v_pool.dtype and k_pool.dtype in QUERY_DTYPES + QUANTIZED_DTYPES,
        f"k_pool and v_pool must both be float32, bfloat16, float16, int8 or float8_e4m3fn, got {k_pool.dtype} and "
        f"{v_pool.dtype}",
    )
    _require(
        slot_mapping.shape == key.shape[:1] and slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous(),
        f"slot_mapping must be contiguous int64 [{key.shape[0]}], got {slot_mapping.dtype} {list(slot_mapping.shape)}",
    )
    _require(value.shape[:2] == key.shape[:2], f"value must have key's tokens and heads {list(key.shape[:2])}")
    check_scales(k_pool, v_pool, k_scale, v_scale)
    if turn_factor is not None:
        check_turn_factor(turn_factor, key.shape[1], key.shape[2])
