"""Weights from codes and scales inside kernels: exact values in bfloat16, multiplied with their scales, rounded once.

A thread has two neighbouring columns in a register, and makes both of them with one instruction. Other types than
bfloat16 compute one by one in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.runners.cuda.kernels.quant.int4 import FOUR_RAW_BITS
from slipstream.runners.cuda.kernels.quant.int8 import UNIT, halves
from slipstream.runners.cuda.kernels.quant.quantize import concatenated

# Bits of a small whole number, read as bfloat16, are that number times 2^-133: times 2^127 (2^123 four bits further up)
# and less the offset they are a value over 64.
_FOUR_BITS = tl.constexpr("""{
    .reg .b32 high, a, b, c, d, low_unit, high_unit;
    mov.b32 low_unit, 0x7f007f00;
    mov.b32 high_unit, 0x7d007d00;
    shr.u32 high, $4, 8;
    and.b32 a, $4, 0x000f000f;
    and.b32 b, $4, 0x00f000f0;
    and.b32 c, high, 0x000f000f;
    and.b32 d, high, 0x00f000f0;
    fma.rn.bf16x2 $0, a, low_unit, $5;
    fma.rn.bf16x2 $1, b, high_unit, $5;
    fma.rn.bf16x2 $2, c, low_unit, $5;
    fma.rn.bf16x2 $3, d, high_unit, $5;
}""")


def _more_bits(shifts: tuple[str, str, str, str], mask: str, raw: bool) -> tl.constexpr:
    """``shifts``: that bring the high bits of each of the four codes to where ``mask`` is."""
    lines = [".reg .b32 low, high, code, unit;", "mov.b32 unit, 0x7f007f00;"]
    for i, shift in enumerate(shifts):
        made = f"${i}" if raw else "code"
        lines += [f"shr.u32 low, $4, {4 * i};", f"{shift};", f"and.b32 high, high, {mask};"]
        lines += [f"lop3.b32 {made}, low, 0x000f000f, high, 0xea;"]
        lines += [] if raw else [f"fma.rn.bf16x2 ${i}, code, unit, $6;"]
    return tl.constexpr("{" + "\n".join(lines) + "}")


_FIFTH = ("shl.b32 high, $5, 4", "shl.b32 high, $5, 3", "shl.b32 high, $5, 2", "shl.b32 high, $5, 1")
_SIXTH = ("shl.b32 high, $5, 4", "shl.b32 high, $5, 2", "mov.b32 high, $5", "shr.u32 high, $5, 2")
_FIVE_BITS, _FIVE_RAW_BITS = (_more_bits(_FIFTH, "0x00100010", raw) for raw in (False, True))
_SIX_BITS = _more_bits(_SIXTH, "0x00300030", raw=False)
# The fields of a plane's word, each in the low bits of a word; what is above them is masked later.
_TWO_FIELDS = tl.constexpr("mov.b32 $0, $2; shr.u32 $1, $2, 8;")
_FOUR_FIELDS = tl.constexpr("mov.b32 $0, $4; shr.u32 $1, $4, 4; shr.u32 $2, $4, 8; shr.u32 $3, $4, 12;")
# Four codes select four bytes of each half of the table; their highest bits select one of the two.
_TABLE = tl.constexpr("""{
    .reg .b32 three, three_high, half, half_high, low_a, low_b, high_a, high_b, first, second, ab, cd, a, b, c, d;
    .reg .b32 unit, bias;
    mov.b32 unit, 0x7f007f00;
    mov.b32 bias, 0xc000c000;
    and.b32 three, $4, 0x77777777;
    shr.u32 three_high, three, 16;
    shr.u32 half, $4, 1;
    lop3.b32 half, half, 0x44444444, 0x32103210, 0xea;
    shr.u32 half_high, half, 16;
    prmt.b32 low_a, $5, $7, three;
    prmt.b32 high_a, $9, $11, three;
    prmt.b32 low_b, $5, $7, three_high;
    prmt.b32 high_b, $9, $11, three_high;
    prmt.b32 first, low_a, high_a, half;
    prmt.b32 second, low_b, high_b, half_high;
    prmt.b32 ab, first, second, 0x5410;
    prmt.b32 cd, first, second, 0x7632;
    and.b32 a, ab, 0x00ff00ff;
    prmt.b32 b, ab, 0, 0x4341;
    and.b32 c, cd, 0x00ff00ff;
    prmt.b32 d, cd, 0, 0x4341;
    fma.rn.bf16x2 $0, a, unit, bias;
    fma.rn.bf16x2 $1, b, unit, bias;
    fma.rn.bf16x2 $2, c, unit, bias;
    fma.rn.bf16x2 $3, d, unit, bias;
}""")
_FP8_HALVES = tl.constexpr("""{
    .reg .b32 low, high, unit, zero;
    mov.b32 unit, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    shl.b32 low, $2, 4;
    and.b32 low, low, 0x07f007f0;
    shr.u32 high, $2, 4;
    and.b32 high, high, 0x07f007f0;
    fma.rn.bf16x2 $0, low, unit, zero;
    fma.rn.bf16x2 $1, high, unit, zero;
}""")
_TIMES = tl.constexpr("""{
    .reg .b32 zero;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 $0, $1, $2, zero;
}""")
# Two columns of one row have the same scale: the compiler sees it, and takes both halves of it as they are.
_TIMES_PAIR = tl.constexpr("""{
    .reg .b16 high0, high1, low0, low1;
    .reg .b32 high, low, zero;
    mov.b32 {high0, low0}, $2;
    mov.b32 {high1, low1}, $3;
    mov.b32 high, {high0, high1};
    mov.b32 low, {low0, low1};
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 low, $1, low, zero;
    fma.rn.bf16x2 $0, $1, high, low;
}""")


@triton.jit
def values_of_codes(
    words, high, dtype: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Of a whole tile, over UNIT, in that type: exact. words: int16 [N, W] -> [N, TILE]

    high: int16 [N, 16 * high bits] or None. TABLE: the bytes of a table as one number; 0: codes are values.
    RAW: in bfloat16, the bits of codes as they are; see ``raw_factors``.
    """
    if BITS == 8:
        low_half, high_half = halves(words, dtype)
        made = beside(low_half, high_half)
    elif dtype == tl.bfloat16:
        made = _in_pairs(words, high, BITS, OFFSET, TABLE, RAW)
    else:
        made = _one_by_one(words, high, BITS, OFFSET, TABLE).to(dtype)
    return made


@triton.jit
def raw_factors(factors, BITS: tl.constexpr):
    """For raw codes: their products are 2^-39 of values times factors. bfloat16 [N, groups]"""
    N: tl.constexpr = factors.shape[0]
    G: tl.constexpr = factors.shape[1]
    further_up = (tl.arange(0, G) * 4 // G) % 2 == (1 if BITS == 4 else 2)
    unit = tl.where(further_up, 2.0**96, 2.0**100).to(tl.bfloat16)
    unit = tl.broadcast_to(unit[None, :], [N, G])
    return tl.inline_asm_elementwise(_TIMES, "=r,r,r", [factors, unit], dtype=tl.bfloat16, is_pure=True, pack=2)


RAW_UNIT = tl.constexpr(2.0**27)  # what is left to do on the sums of raw codes


@triton.jit
def _quarter(TABLE: tl.constexpr, at: tl.constexpr):
    """Four bytes of a table. int32"""
    bits: tl.constexpr = (TABLE >> 32 * at) & 0xFFFFFFFF
    signed: tl.constexpr = bits - (1 << 32) if bits >= 1 << 31 else bits
    return tl.full([], signed, tl.int32)


@triton.jit
def _in_pairs(
    words, high, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    bias = tl.full(words.shape, -OFFSET / UNIT, tl.bfloat16)
    if TABLE:
        t0 = _quarter(TABLE, 0)
        t1 = _quarter(TABLE, 1)
        t2 = _quarter(TABLE, 2)
        t3 = _quarter(TABLE, 3)
        a, b, c, d = tl.inline_asm_elementwise(
            _TABLE, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [words, t0, t1, t2, t3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 4:
        text: tl.constexpr = FOUR_RAW_BITS if RAW else _FOUR_BITS
        a, b, c, d = tl.inline_asm_elementwise(
            text, "=r,=r,=r,=r,r,r", [words, bias],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        more: tl.constexpr = _SIX_BITS if BITS == 6 else _FIVE_RAW_BITS if RAW else _FIVE_BITS
        a, b, c, d = tl.inline_asm_elementwise(
            more, "=r,=r,=r,=r,r,r,r", [words, _fields(high, BITS), bias],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return concatenated(a, b, c, d)


@triton.jit
def _fields(high, BITS: tl.constexpr):
    """The high bits of each word's four codes, in the low bits of an int16: [N, TILE / 4]"""
    if BITS == 6:
        a, b = tl.inline_asm_elementwise(
            _TWO_FIELDS, "=r,=r,r", [high], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
        )
        made = beside(a, b)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _FOUR_FIELDS, "=r,=r,=r,=r,r", [high], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2
        )
        made = concatenated(a, b, c, d)
    return made


@triton.jit
def _one_by_one(words, high, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr):
    """The same in float32, for all other types."""
    codes = concatenated(words & 15, words >> 4 & 15, words >> 8 & 15, words >> 12 & 15).to(tl.int32)
    if TABLE:
        first = tl.where(codes < 4, _quarter(TABLE, 0), _quarter(TABLE, 1))
        four = tl.where(codes < 8, first, tl.where(codes < 12, _quarter(TABLE, 2), _quarter(TABLE, 3)))
        codes = four >> (codes & 3) * 8 & 255
    if BITS > 4:
        H: tl.constexpr = BITS - 4
        F: tl.constexpr = (1 << H) - 1
        if BITS == 6:
            fields = beside(high, high >> 8)
        else:
            fields = concatenated(high, high >> 4, high >> 8, high >> 12)
        more = concatenated(fields & F, fields >> H & F, fields >> 2 * H & F, fields >> 3 * H & F)
        codes += more.to(tl.int32) << 4
    return (codes - OFFSET).to(tl.float32) / UNIT


@triton.jit
def factors_of(scales, dtype: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr):
    """Factors of scales, and of minimums if there are any: whole numbers over UNIT, or FP8 (FACTORS is 2).

    scales: int16 [N, rows of scales] -> [N, groups] each
    """
    if FACTORS == 2:
        low, high = _fp8_halves(scales, dtype)
    else:
        low, high = halves(scales, dtype)
    if MINIMUM:
        factors = low
        minimum_factors = high
    else:
        factors = tl.join(low, high).reshape([low.shape[0], low.shape[1] * 2])
        minimum_factors = factors
    return factors, minimum_factors


@triton.jit
def _fp8_halves(words, dtype: tl.constexpr):
    """The positive FP8 (e4m3) in the low and in the high bytes: their bits, moved up, are bfloat16 times 2^-120."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _FP8_HALVES, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        bits = words.to(tl.int32)
        low = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        high = ((bits >> 8 & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    return low.to(dtype), high.to(dtype)


@triton.jit
def spread(scales, K: tl.constexpr):
    """[N, groups] -> [N, K]"""
    N: tl.constexpr = scales.shape[0]
    G: tl.constexpr = scales.shape[1]
    return tl.broadcast_to(scales[:, :, None], [N, G, K // G]).reshape([N, K])


@triton.jit
def times_factors(values, factors, dtype: tl.constexpr):
    """Rounded once. [N, K], [N, groups]"""
    wide = spread(factors, values.shape[1])
    if dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(_TIMES, "=r,r,r", [values, wide], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        made = (values.to(tl.float32) * wide.to(tl.float32)).to(dtype)
    return made


@triton.jit
def times_pairs(values, pairs, dtype: tl.constexpr):
    """Rounded once. pairs: int32 [N, groups]"""
    wide = spread(pairs, values.shape[1])
    if dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(
            _TIMES_PAIR, "=r,r,r,r", [values, wide], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        made = (values.to(tl.float32) * pair_sum(wide)).to(dtype)
    return made


@triton.jit
def whole_weights(values, scales, lows, dtype: tl.constexpr):
    """With their minimums, rounded once. scales, lows: float32 [N, groups]"""
    K: tl.constexpr = values.shape[1]
    return (values.to(tl.float32) * spread(scales, K) + spread(lows, K)).to(dtype)


@triton.jit
def pair_high(pairs):
    """float32, of two bfloat16 in an int32: the larger one, in the low half"""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def pair_low(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pair_sum(pairs):
    return pair_high(pairs) + pair_low(pairs)


@triton.jit
def beside(a, b):
    """[N, W] each -> [N, 2 W]"""
    N: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    return tl.join(a, b).permute(0, 2, 1).reshape([N, 2 * W])
