"""Eight-bit keys and values to the tensor cores' 16-bit types, and back to eight bits, by bit operations.

    int8: x -> x                      e4m3: x -> x / 256 (a shift; the kernel folds 256 into its scale)

Bits instead of casts because a cast to or from float8 exists neither in the interpreter nor before Hopper, and because
a GPU converts integers to floats at an eighth of the rate at which it does arithmetic. A compiled kernel takes four
bytes at a time through inline assembly: two instructions an element, where scalar code needs five.

`split_bytes` goes the other way: 16-bit queries and probabilities become sums of 8-bit pieces, so that the tensor cores
multiply the pool's bytes as they are and nothing of a tile of keys or values is ever converted:

    x = piece_0 + piece_1 / RADIX + piece_2 / RADIX^2,   RADIX 254 (int8), 16 (e4m3)
"""

import torch
import triton
import triton.language as tl

# What a pool's bytes mean: the FORMAT argument of every kernel that reads or writes a pool.
FLOAT = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
INT4 = tl.constexpr(3)  # two elements a byte, in kernels/int4.py

INT8_MAX = tl.constexpr(127.0)
E4M3_MAX = tl.constexpr(448.0)
# Below this a scale would lose bits to underflow; a token of zeros gets it too, and decodes to zeros.
SMALLEST_SCALE = tl.constexpr(1e-30)


# The next piece holds what rounding left of this one, magnified: half a unit of int8; 2^-4 of a value of e4m3.
INT8_RADIX = tl.constexpr(254.0)
E4M3_RADIX = tl.constexpr(16.0)

# Whether kernels are compiled for an Nvidia GPU: the interpreter knows no assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# Four bytes to four 16-bit floats. prmt spreads the bytes, one to each half of two registers.
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 w, a, b, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 w, $2, 0, 0x4140;
    lop3.b32 a, w, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, w, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $0, a, one, b;
    prmt.b32 w, $2, 0, 0x4342;
    lop3.b32 a, w, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, w, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $1, a, one, b;
}""")  # 128 + (x & 127), less 128, or 256 where x is negative
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 u, w, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 w, u, 0x64646464, 0x4140;
    sub.f16x2 $0, w, bias;
    prmt.b32 w, u, 0x64646464, 0x4342;
    sub.f16x2 $1, w, bias;
}""")  # 1024 + (x + 128), less 1152
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 w, t, factor, zero;
    mov.b32 factor, 0x77807780;
    mov.b32 zero, 0x80008000;
    prmt.b32 w, $2, 0, 0x1404;
    and.b32 t, w, 0x7F007F00;
    shr.b32 t, t, 4;
    lop3.b32 t, w, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $0, t, factor, zero;
    prmt.b32 w, $2, 0, 0x3424;
    and.b32 t, w, 0x7F007F00;
    shr.b32 t, t, 4;
    lop3.b32 t, w, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $1, t, factor, zero;
}""")  # the exponent is read with bias 127, not 7: 2^-120, and 2^112 of it is given back
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b32 w, t;
    prmt.b32 w, $2, 0, 0x1404;
    and.b32 t, w, 0x7F007F00;
    shr.b32 t, t, 1;
    lop3.b32 $0, w, 0x80008000, t, 0xEA;
    prmt.b32 w, $2, 0, 0x3424;
    and.b32 t, w, 0x7F007F00;
    shr.b32 t, t, 1;
    lop3.b32 $1, w, 0x80008000, t, 0xEA;
}""")


def pool_format(dtype: torch.dtype) -> tl.constexpr:
    """FORMAT of a pool of this dtype."""
    return {torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.uint8: INT4}.get(dtype, FLOAT)


def pool_factor(dtype: torch.dtype) -> float:
    """What `decode_tile` leaves out: an e4m3 byte shifted into a float16 has its exponent read with bias 15, not 7."""
    return 256.0 if dtype == torch.float8_e4m3fn else 1.0


def pool_bytes(pool: torch.Tensor) -> torch.Tensor:
    """The pool as the kernels take it: float8 as bytes, which every device and the interpreter know."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def dot_dtypes(query_dtype: torch.dtype, key_dtype: torch.dtype, value_dtype: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """The types in which queries meet keys and probabilities meet values, of pools of these dtypes."""
    if query_dtype == torch.float32 or triton.knobs.runtime.interpret:
        # The interpreter's dot takes bfloat16's bits for integers.
        return tl.float32, tl.float32
    arriving = tl.float16 if query_dtype == torch.float16 else tl.bfloat16
    # float16 holds a byte exactly and what int4 decodes to better than bfloat16 does, and takes half the instructions
    # to make; queries are `fitted` to it. A probability times an 8-bit value's scale may leave its range.
    key = tl.float16 if key_dtype in (torch.int8, torch.uint8) else arriving
    if value_dtype in (torch.int8, torch.float8_e4m3fn):
        value = tl.bfloat16
    else:
        value = tl.float16 if value_dtype == torch.uint8 else arriving
    return key, value


@triton.jit
def decode_tile(tile, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """A tile of pool elements in `dtype`; e4m3 comes divided by 256."""
    if ASSEMBLY and (FORMAT == INT8 and dtype == tl.bfloat16):
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif ASSEMBLY and (FORMAT == INT8 and dtype == tl.float16):
        return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4)
    elif ASSEMBLY and (FORMAT == E4M3 and dtype == tl.bfloat16):
        return tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif ASSEMBLY and (FORMAT == E4M3 and dtype == tl.float16):
        return tl.inline_asm_elementwise(E4M3_TO_FP16, "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4)
    elif FORMAT == E4M3:
        bits = tile.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        tile = bits.to(tl.float16, bitcast=True)
    return tile.to(dtype)


@triton.jit
def fitted(q, scale, dtype: tl.constexpr):
    """q in `dtype`, and the scale of its products.

    Another type than float16 need not fit in it: q is then divided by the power of two that takes its largest magnitude
    to 2^14 .. 2^15, and the scale multiplied by it. That loses nothing but in rows that are 2^24 times smaller than the
    tile's largest.
    """
    if dtype == tl.float16 and q.dtype != tl.float16:
        x = q.to(tl.float32)
        exponent = tl.abs(x).to(tl.int32, bitcast=True) >> 23
        # A row that is not finite says nothing of the others.
        exponent = tl.max(tl.max(tl.where(exponent == 255, 0, exponent), 1), 0)
        # 2^(exponent - 127 - 14), in the bits of a float32 that is not subnormal.
        power = tl.maximum(exponent - 14, 1)
        q = x * ((254 - power) << 23).to(tl.float32, bitcast=True)
        scale *= (power << 23).to(tl.float32, bitcast=True)
    return q.to(dtype), scale


@triton.jit
def round_half_even(x):
    """Nearest integer of a float32 with |x| < 2^22: adding 1.5 * 2^23 leaves no bit for the fraction."""
    magic = 12582912.0
    return (x + magic) - magic


@triton.jit
def encode_e4m3(x):
    """float32, |x| <= 448 or a few roundings more, to an e4m3 byte, nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2^-6 e4m3 is a multiple of 2^-9, and the multiple is the byte.
    subnormal = round_half_even(tl.abs(x) * 512.0).to(tl.int32)
    byte = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    return (sign | byte).to(tl.uint8)


@triton.jit
def row_scale(size, FORMAT: tl.constexpr):
    """The scale [rows] of rows whose largest magnitude is `size`, rounded as IEEE division rounds it.

    As in `quotient`; for these two divisors every float32 was tried.
    """
    largest: tl.constexpr = INT8_MAX if FORMAT == INT8 else E4M3_MAX
    if ASSEMBLY:
        reciprocal: tl.constexpr = 1.0 / largest
        guess = size * reciprocal
        scale = tl.fma(tl.fma(guess, -largest, size), reciprocal, guess)
        # An infinity has no remainder, and must not pass for a number.
        scale = tl.where(size < float("inf"), scale, size)
    else:
        scale = tl.div_rn(size, largest)
    return tl.maximum(scale, SMALLEST_SCALE)


@triton.jit
def quotient(x, scale):
    """x [rows, D] / scale [rows], with which a code is chosen as with IEEE division.

    A correctly rounded reciprocal, and the remainder of the quotient that it gives (P. Markstein, Computation of
    elementary functions on the IBM RISC System/6000 processor, 1990): three instructions an element and no
    branch. Only where the remainder underflows, x below 2^-100, may the last bit differ.
    """
    scale = scale[:, None]
    if ASSEMBLY:
        reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        guess = x * reciprocal
        # The minus at the scale: -guess would be one more multiplication an element.
        result = tl.fma(tl.fma(guess, -scale, x), reciprocal, guess)
    else:
        # The interpreter's fma rounds twice.
        result = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return result


@triton.jit
def encode(x, FORMAT: tl.constexpr, FLOAT8: tl.constexpr):
    """float32 to the int8 or the e4m3 byte that is nearest, half to even. x is at most a few roundings out of range.

    FLOAT8: the GPU casts to float8 by itself.
    """
    if FORMAT == INT8:
        # 1.5 * 2^23 + x has the rounded x in its low bits: no conversion instruction.
        code = (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif ASSEMBLY and FLOAT8:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode_e4m3(x)
    return code


@triton.jit
def to_byte(x, FORMAT: tl.constexpr):
    """float32 within the format's range to an int8 or float8 element, nearest even, and the element's value."""
    if FORMAT == INT8:
        # As in `encode`, and its value.
        shifted = x + 12582912.0
        code = shifted.to(tl.int32, bitcast=True).to(tl.int8)
        value = shifted - 12582912.0
    elif ASSEMBLY:
        code = x.to(tl.float8e4nv)
        value = code.to(tl.float32)
    else:
        byte = encode_e4m3(x)
        code = byte.to(tl.float8e4nv, bitcast=True)
        value = decode_tile(byte, FORMAT, tl.float32) * 256.0
    return code, value


@triton.jit
def split_bytes(x, piece, FORMAT: tl.constexpr, PIECES: tl.constexpr):
    """Piece number `piece` (broadcast with x) of x, |x| <= 127 (int8) or 448 (e4m3); 0 past the last."""
    radix: tl.constexpr = INT8_RADIX if FORMAT == INT8 else E4M3_RADIX
    first, value = to_byte(x, FORMAT)
    rest = (x - value) * radix
    second, value = to_byte(rest, FORMAT)
    # Chosen as bytes: float8 has no select.
    pieces = tl.where(piece == 0, first.to(tl.uint8, bitcast=True), second.to(tl.uint8, bitcast=True))
    if PIECES > 2:
        third, value = to_byte((rest - value) * radix, FORMAT)
        pieces = tl.where(piece < 2, pieces, tl.where(piece == 2, third.to(tl.uint8, bitcast=True), 0))
    return pieces.to(first.dtype, bitcast=True)


@triton.jit
def piece_weight(piece, FORMAT: tl.constexpr):
    """What element `piece` of `split_bytes` counts: RADIX^-piece, 0 past the third."""
    radix: tl.constexpr = INT8_RADIX if FORMAT == INT8 else E4M3_RADIX
    weight = tl.where(piece == 0, 1.0, 1.0 / radix)
    return tl.where(piece < 2, weight, tl.where(piece == 2, 1.0 / (radix * radix), 0.0))
