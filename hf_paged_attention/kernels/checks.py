"""What a call must hold before a kernel runs: every message names the argument and the value it got."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .int4 import GROUP, value_groups
from .integers import next_power_of_2

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
PACKED_DTYPE = torch.uint8  # int4, two elements a byte
POOL_DTYPES = (*QUERY_DTYPES, *QUANTIZED_DTYPES, PACKED_DTYPE)
_NEEDED = "must be float32, bfloat16, float16, int8, float8_e4m3fn or uint8 (int4)"
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
    value_pool_dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def quantized(self) -> bool:
        return self.pool_dtype in QUANTIZED_DTYPES

    @property
    def packed(self) -> bool:
        """Whether keys or values are int4."""
        return PACKED_DTYPE in (self.pool_dtype, self.value_pool_dtype)

    @property
    def mixed(self) -> bool:
        """Whether no operand's bytes can be used as they are stored: int4, or keys and values in two formats."""
        return self.packed or self.pool_dtype != self.value_pool_dtype

    @property
    def fewest_keys(self) -> int:
        """Keys of the smallest tile.

        int4 keys come in groups of tokens. And where a product sums over fewer than 32 elements that came two a byte,
        Triton 3.6 pairs the wrong ones.
        """
        return GROUP if self.packed else 16

    @property
    def channels(self) -> tuple[int, int]:
        """Columns of a tile of keys and of one of values; of int4 keys in float32 32 at least, for that reason."""
        least = 32 if self.pool_dtype == PACKED_DTYPE and self.query_dtype == torch.float32 else 1
        return max(least, next_power_of_2(self.head_dim)), next_power_of_2(self.value_dim)


def strides_or_zeros(tensor: torch.Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()


def _require(condition: bool, message: Callable[[], str] | str) -> None:
    """`ValueError` unless the condition holds. A message with values in it is a function: a decode step makes none."""
    if not condition:
        raise ValueError(message() if callable(message) else message)


def _check_ints(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    _require(tensor.dtype == torch.int32, lambda: f"{name} must be int32, got {tensor.dtype}")
    _require(tuple(tensor.shape) == shape, lambda: f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    _require(tensor.numel() == 0 or tensor.stride(-1) == 1, lambda: f"{name} must be contiguous in its last dimension")


def _channels(pool: torch.Tensor) -> int:
    """Channels of a pool's vectors, of which an int4 pool holds two a byte."""
    return pool.shape[3] * (2 if pool.dtype == PACKED_DTYPE else 1)


def _scale_shape(name: str, pool: torch.Tensor) -> list[int]:
    num_blocks, block_size, heads = pool.shape[:3]
    if pool.dtype != PACKED_DTYPE:
        return [num_blocks, block_size, heads]
    if name == "k_scale":
        return [num_blocks, block_size // GROUP, heads, 2, _channels(pool)]
    return [num_blocks, block_size, heads, 2, value_groups(_channels(pool))]


def check_scales(k_pool: torch.Tensor, v_pool: torch.Tensor, k_scale, v_scale) -> None:
    """8-bit pools come with float32 scales [num_blocks, block_size, Hkv], int4 with those of int4.py, others without.

    Raises:
        ValueError: scales missing, superfluous, or of another shape or dtype.
    """
    _check_scale("k_scale", k_pool, k_scale)
    _check_scale("v_scale", v_pool, v_scale)


def _check_scale(name: str, pool: torch.Tensor, scales: torch.Tensor | None) -> None:
    packed = pool.dtype == PACKED_DTYPE
    if packed or pool.dtype in QUANTIZED_DTYPES:
        dtype = torch.float16 if packed else torch.float32
        _require(scales is not None, lambda: f"{name} is needed for a pool of {pool.dtype}, got None")
        _require(scales.dtype == dtype, lambda: f"{name} must be {str(dtype)[6:]}, got {scales.dtype}")
        _require(
            list(scales.shape) == _scale_shape(name, pool),
            lambda: f"{name} must have shape {_scale_shape(name, pool)}, got {list(scales.shape)}",
        )
        _require(
            not packed or scales.numel() == 0 or scales.stride()[3:] == (scales.shape[4], 1),
            lambda: f"{name} must be contiguous in its last two dimensions, got strides {scales.stride()}",
        )
        _require(
            not packed or pool.numel() == 0 or pool.stride(3) == 1,
            lambda: f"an int4 pool must be contiguous in its last dimension, got strides {pool.stride()}",
        )
        if packed and _channels(pool) % 8 == 0:  # kernels read four bytes at a time
            _check_words("an int4 pool", pool)
            if scales.shape[4] % 2 == 0:
                _check_words(name, scales)
    else:
        _require(scales is None, lambda: f"{name} belongs to int8 and float8_e4m3fn pools; this pool is {pool.dtype}")


def _check_words(name: str, tensor: torch.Tensor) -> None:
    """Rows of the last dimension must begin where a 32-bit number can be read."""
    size = tensor.element_size()
    strides = [stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if length > 1]
    _require(
        tensor.data_ptr() % 4 == 0 and all(stride * size % 4 == 0 for stride in strides if stride != 1),
        lambda: f"{name} must have rows that begin at multiples of four bytes, got strides {tensor.stride()}",
    )


def check_turn_factor(turn_factor: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """The factor of turned keys is contiguous float32 [Hkv, D].

    Raises:
        ValueError: it is not.
    """
    _require(
        turn_factor.shape == (kv_heads, head_dim)
        and turn_factor.dtype == torch.float32
        and turn_factor.is_contiguous(),
        lambda: (
            f"turn_factor must be contiguous float32 [{kv_heads}, {head_dim}], got {turn_factor.dtype} "
            f"{list(turn_factor.shape)}"
        ),
    )


def _check_dtypes(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    _require(k_pool.dtype in POOL_DTYPES, lambda: f"k_pool {_NEEDED}, got {k_pool.dtype}")
    _require(v_pool.dtype in POOL_DTYPES, lambda: f"v_pool {_NEEDED}, got {v_pool.dtype}")


def _check_tail(k_pool, value_dim: int, requests: int, k_tail, v_tail, tail_table, sealed_lens) -> None:
    given = [each is not None for each in (k_tail, v_tail, tail_table, sealed_lens)]
    if k_pool.dtype != PACKED_DTYPE:
        _require(not any(given), "k_tail, v_tail, tail_table and sealed_lens belong to int4 keys")
        return
    _require(all(given), "int4 keys need k_tail, v_tail, tail_table and sealed_lens")
    _check_tail_pool("k_tail", k_tail, (*k_pool.shape[1:3], _channels(k_pool)))
    _check_tail_pool("v_tail", v_tail, (*k_pool.shape[1:3], value_dim))
    _check_ints("tail_table", tail_table, (requests, tail_table.shape[-1]))
    _check_ints("sealed_lens", sealed_lens, (requests,))


def _check_tail_pool(name: str, pool: torch.Tensor, page: tuple[int, ...]) -> None:
    _require(
        pool.dim() == 4 and pool.shape[1:] == page and pool.dtype in QUERY_DTYPES,
        lambda: f"{name} must be a float [num_blocks, {str(page)[1:-1]}], got {pool.dtype} {list(pool.shape)}",
    )


def check_attention(
    query, k_pool, v_pool, query_start_loc, seq_lens, block_table, window, softcap, sinks, k_scale, v_scale, kv_start,
    k_tail, v_tail, tail_table, sealed_lens, out, lse,
) -> AttentionShape:  # fmt: skip
    """The sizes of an attention call.

    Raises:
        ValueError: an argument whose shape, dtype or stride no kernel takes.
    """
    _require(query.dim() == 3, lambda: f"query must be [tokens, heads, head_dim], got shape {list(query.shape)}")
    _require(query.dtype in QUERY_DTYPES, lambda: f"query must be float32, bfloat16 or float16, got {query.dtype}")
    _require(
        query.numel() == 0 or query.stride(-1) == 1,
        lambda: f"query must be contiguous in head_dim, got {query.stride()}",
    )
    _require(
        k_pool.dim() == 4 and v_pool.dim() == 4 and k_pool.shape[:3] == v_pool.shape[:3],
        lambda: (
            "k_pool and v_pool must be [num_blocks, block_size, kv_heads, head_dim] and agree but for head_dim, got "
            f"{list(k_pool.shape)} and {list(v_pool.shape)}"
        ),
    )
    _check_dtypes(k_pool, v_pool)
    tokens, query_heads, head_dim = query.shape
    _, block_size, kv_heads, _ = v_pool.shape
    value_dim = _channels(v_pool)
    _require(
        _channels(k_pool) == head_dim,
        lambda: f"k_pool must have the query's head_dim {head_dim}, got {list(k_pool.shape)}",
    )
    _require(
        max(head_dim, value_dim) <= MAX_HEAD_DIM,
        lambda: f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim} (keys) and {value_dim} (values)",
    )
    _require(
        query_heads % kv_heads == 0, lambda: f"query heads must be a multiple of kv_heads {kv_heads}, got {query_heads}"
    )
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
        page = max(next_power_of_2(block_size), MIN_BLOCK_SIZE)
    _require(
        page >= MIN_BLOCK_SIZE and page & (page - 1) == 0,
        lambda: f"block_size must be a power of two of at least {MIN_BLOCK_SIZE}, got {block_size}",
    )
    _require(window is None or window > 0, lambda: f"window must be positive or None, got {window}")
    _require(softcap is None or softcap > 0, lambda: f"softcap must be positive or None, got {softcap}")
    _require(
        sinks is None or (sinks.shape == (query_heads,) and sinks.is_contiguous()),
        lambda: f"sinks must be contiguous, one a query head [{query_heads}]",
    )
    _require(
        k_pool.dtype != PACKED_DTYPE or (page >= GROUP and page == block_size),
        lambda: f"block_size must be a power of two of at least {GROUP} for int4 keys, got {block_size}",
    )
    check_scales(k_pool, v_pool, k_scale, v_scale)
    _check_tail(k_pool, value_dim, requests, k_tail, v_tail, tail_table, sealed_lens)
    if out is not None:
        _require(
            out.shape == (tokens, query_heads, value_dim) and out.dtype == query.dtype,
            lambda: (
                f"out must be {query.dtype} [{tokens}, {query_heads}, {value_dim}], got {out.dtype} {list(out.shape)}"
            ),
        )
        _require(out.numel() == 0 or out.stride(-1) == 1, "out must be contiguous in its last dimension")
    if lse is not None:
        _require(
            lse.shape == (tokens, query_heads) and lse.dtype == torch.float32,
            lambda: f"lse must be float32 [{tokens}, {query_heads}], got {lse.dtype} {list(lse.shape)}",
        )
    return AttentionShape(
        tokens, requests, query_heads, kv_heads, head_dim, value_dim, page, query.dtype, k_pool.dtype, v_pool.dtype,
        query.device,
    )  # fmt: skip


def _check_new(name: str, new: torch.Tensor, pool_name: str, pool: torch.Tensor) -> None:
    _require(new.dim() == 3, lambda: f"{name} must be [tokens, kv_heads, head_dim], got shape {list(new.shape)}")
    _require(new.dtype in QUERY_DTYPES, lambda: f"{name} must be float32, bfloat16 or float16, got {new.dtype}")
    _require(
        new.numel() == 0 or new.stride(-1) == 1, lambda: f"{name} must be contiguous in head_dim, got {new.stride()}"
    )
    _require(
        pool.dim() == 4 and pool.shape[2] == new.shape[1] and _channels(pool) == new.shape[2],
        lambda: f"{pool_name} must be [num_blocks, block_size, {new.shape[1]}, {new.shape[2]}], got {list(pool.shape)}",
    )


def _check_new_tokens(key, value, k_pool, v_pool) -> None:
    _check_new("key", key, "k_pool", k_pool)
    _check_new("value", value, "v_pool", v_pool)
    _check_dtypes(k_pool, v_pool)
    _require(value.shape[:2] == key.shape[:2], lambda: f"value must have key's tokens and heads {list(key.shape[:2])}")


def check_write(key, value, k_pool, v_pool, slot_mapping, k_scale, v_scale, turn_factor, query) -> None:
    """Sizes of a write.

    Raises:
        ValueError: an argument whose shape, dtype or stride the kernel does not take, such as a pool of int4 keys,
            which are encoded in groups of tokens (`seal_kv`).
    """
    _require(k_pool.dtype != PACKED_DTYPE, "k_pool of int4 keys is written a block at a time: use seal_kv")
    _check_new_tokens(key, value, k_pool, v_pool)
    _require(
        slot_mapping.shape == key.shape[:1] and slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous(),
        lambda: (
            f"slot_mapping must be contiguous int64 [{key.shape[0]}], got {slot_mapping.dtype} "
            f"{list(slot_mapping.shape)}"
        ),
    )
    check_scales(k_pool, v_pool, k_scale, v_scale)
    slots = k_pool.shape[0] * k_pool.shape[1]
    _require(slots < 2**31, lambda: f"k_pool must have fewer than 2^31 slots, got {slots}")
    if turn_factor is not None:
        check_turn_factor(turn_factor, key.shape[1], key.shape[2])
    if query is not None:
        _check_query_beside(query, key, turn_factor)


def _check_query_beside(query, key, turn_factor) -> None:
    tokens, kv_heads, head_dim = key.shape
    _require(turn_factor is not None, "query is turned by turn_factor, got turn_factor None")
    _require(
        query.dim() == 3 and (query.shape[0], query.shape[2]) == (tokens, head_dim) and query.shape[1] % kv_heads == 0,
        lambda: f"query must be [{tokens}, a multiple of {kv_heads}, {head_dim}], got {list(query.shape)}",
    )
    _require(query.dtype in QUERY_DTYPES, lambda: f"query must be float32, bfloat16 or float16, got {query.dtype}")
    _require(
        query.numel() == 0 or query.stride(-1) == 1,
        lambda: f"query must be contiguous in head_dim, got {query.stride()}",
    )


def check_seal(
    key, value, k_pool, v_pool, k_scale, v_scale, k_tail, v_tail, query_start_loc, seq_lens, block_table, tail_table,
    seal_requests, seal_blocks,
) -> None:  # fmt: skip
    """Sizes of a seal.

    Raises:
        ValueError: an argument whose shape, dtype or stride the kernel does not take.
    """
    _check_new_tokens(key, value, k_pool, v_pool)
    page = k_pool.shape[1]
    _require(k_pool.dtype == PACKED_DTYPE, lambda: f"k_pool must hold int4 keys (uint8), got {k_pool.dtype}")
    _require(
        page >= GROUP and page & (page - 1) == 0,
        lambda: f"block_size must be a power of two of at least {GROUP} for int4 keys, got {page}",
    )
    check_scales(k_pool, v_pool, k_scale, v_scale)
    requests = seq_lens.shape[0]
    _check_ints("query_start_loc", query_start_loc, (requests + 1,))
    _check_ints("block_table", block_table, (requests, block_table.shape[-1]))
    _check_ints("seq_lens", seq_lens, (requests,))
    _check_tail(k_pool, value.shape[2], requests, k_tail, v_tail, tail_table, seq_lens)
    _check_ints("seal_requests", seal_requests, (seal_blocks.shape[0],))
    _check_ints("seal_blocks", seal_blocks, (seal_blocks.shape[0],))
