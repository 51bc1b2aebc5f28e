"""Eight-bit keys and values to the tensor cores' 16-bit types, and back to eight bits, by bit operations.

    int8: x -> x                      e4m3: x -> x / 256 (a shift; the kernel folds 256 into its scale)

Bits instead of casts because a cast to or from float8 exists neither in the interpreter nor before Hopper, and because
two integer instructions a pair of elements is what keeps an 8-bit cache faster than a 16-bit one.
"""

import torch
import triton
import triton.language as tl

# What a pool's bytes mean: the FORMAT argument of every kernel that reads or writes a pool.
FLOAT = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)

INT8_MAX = tl.constexpr(127.0)
E4M3_MAX = tl.constexpr(448.0)
# Below this a scale would lose bits to underflow; a token of zeros gets it too, and decodes to zeros.
SMALLEST_SCALE = tl.constexpr(1e-30)


def pool_format(dtype: torch.dtype) -> tl.constexpr:
    """FORMAT of a pool of this dtype."""
    return {torch.int8: INT8, torch.float8_e4m3fn: E4M3}.get(dtype, FLOAT)


def pool_factor(dtype: torch.dtype) -> float:
    """What `decode_tile` leaves out: an e4m3 byte shifted into a float16 has its exponent read with bias 15, not 7."""
    return 256.0 if dtype == torch.float8_e4m3fn else 1.0


def pool_bytes(pool: torch.Tensor) -> torch.Tensor:
    """The pool as the kernels take it: float8 as bytes, which every device and the interpreter know."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def dot_dtypes(query_dtype: torch.dtype, pool_dtype: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """The types in which queries meet keys and probabilities meet values."""
    if query_dtype == torch.float32 or triton.knobs.runtime.interpret:
        # The interpreter's dot takes bfloat16's bits for integers.
        return tl.float32, tl.float32
    key = tl.float16 if query_dtype == torch.float16 else tl.bfloat16
    # A probability times an 8-bit value's scale may leave float16's range at either end.
    return key, tl.bfloat16 if pool_dtype.itemsize == 1 else key


@triton.jit
def decode_tile(tile, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """A tile of pool elements in `dtype`; e4m3 comes divided by 256."""
    if FORMAT == E4M3:
        bits = tile.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        tile = bits.to(tl.float16, bitcast=True)
    return tile.to(dtype)


@triton.jit
def round_half_even(x):
    """Nearest integer of a float32 with |x| < 2^22: adding 1.5 * 2^23 leaves no bit for the fraction."""
    magic = 12582912.0
    return (x + magic) - magic


@triton.jit
def encode_e4m3(x):
    """float32, |x| <= 448, to an e4m3 byte, nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2^-6 e4m3 is a multiple of 2^-9, and the multiple is the byte.
    subnormal = round_half_even(tl.abs(x) * 512.0).to(tl.int32)
    byte = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    return (sign | byte).to(tl.uint8)
