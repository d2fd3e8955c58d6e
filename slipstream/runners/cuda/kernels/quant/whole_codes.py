"""Codes and scales of quantised files as whole numbers, thread by thread: see matmul/linear_whole.py.

An array has an element a thread. A thread has eight words of each of two rows (in 8 bits: twice eight), and the high
bits that belong to them; a register is four codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.runners.cuda.kernels.quant.code_values import pair_sum

_PERMUTE = tl.constexpr("prmt.b32 $0, $1, $2, $3;")


@triton.jit
def permuted(a, b, selectors):
    """Four of the eight bytes of a and b, by the four lowest nibbles of ``selectors``, each below 8."""
    return tl.inline_asm_elementwise(_PERMUTE, "=r,r,r,r", [a, b, selectors], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def byte_to_float(word, which):
    """A byte of the word, less 128: the bits of 2^23 have room for it."""
    bits = permuted(word, tl.full([], 0x4B000000, tl.int32), which | 0x7440)
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def fp8_to_float(word, which):
    """A byte as a positive e4m3."""
    return ((word >> which * 8 & 127) << 20).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def group_of(part, place, GROUPS: tl.constexpr):
    """Which of a tile's groups these 32 columns belong to; of groups of 16 the first."""
    piece = 2 * place + part
    return 2 * piece if GROUPS == 16 else piece * GROUPS >> 3


@triton.jit
def codes_as_they_lie(found, first: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, table):
    """Eight registers with four codes each of a row, two for each two words: see ``selectors``."""
    a, b, c, d = found[first], found[first + 1], found[first + 2], found[first + 3]
    if BITS == 8:
        near = (a, b, c, d)
        far = (found[first + 4], found[first + 5], found[first + 6], found[first + 7])
    elif TABLE:
        a, e = _table_entries(a, table)
        b, f = _table_entries(b, table)
        c, g = _table_entries(c, table)
        d, h = _table_entries(d, table)
        near = (a, b, c, d)
        far = (e, f, g, h)
    else:
        near = (a & 0x0F0F0F0F, b & 0x0F0F0F0F, c & 0x0F0F0F0F, d & 0x0F0F0F0F)
        far = (a >> 4 & 0x0F0F0F0F, b >> 4 & 0x0F0F0F0F, c >> 4 & 0x0F0F0F0F, d >> 4 & 0x0F0F0F0F)
    return near + far


@triton.jit
def codes_by_place(found, first: tl.constexpr, part, q, BITS: tl.constexpr, TABLE: tl.constexpr, table):
    """The same codes with a register for four neighbouring columns: of the first four words, then of the others."""
    even = tl.full([], 0x6420, tl.int32)
    odd = tl.full([], 0x7531, tl.int32)
    a, b, c, d = found[first], found[first + 1], found[first + 2], found[first + 3]
    if BITS == 8:
        e, f, g, h = found[first + 4], found[first + 5], found[first + 6], found[first + 7]
        near = (permuted(a, b, even), permuted(e, f, even), permuted(a, b, odd), permuted(e, f, odd))
        far = (permuted(c, d, even), permuted(g, h, even), permuted(c, d, odd), permuted(g, h, odd))
    elif TABLE:
        near = _table_by_place(permuted(a, b, even), permuted(a, b, odd), table)
        far = _table_by_place(permuted(c, d, even), permuted(c, d, odd), table)
    else:
        near = _nibbles(permuted(a, b, even), permuted(a, b, odd))
        far = _nibbles(permuted(c, d, even), permuted(c, d, odd))
        if BITS > 4:
            # A byte of the plane's words has the fields of this part of a tile.
            which = tl.where(part == 0, even, odd)
            fields = permuted(found[first + 4], found[first + 5], which)
            more_fields = permuted(found[first + 6], found[first + 7], which)
            if BITS == 5:
                fields = fields >> 4 * (q >> 1)
                more_fields = more_fields >> 4 * (q >> 1)
            near = _with_high_bits(near, fields, BITS)
            far = _with_high_bits(far, more_fields, BITS)
    return near + far


@triton.jit
def _nibbles(low, up):
    return low & 0x0F0F0F0F, low >> 4 & 0x0F0F0F0F, up & 0x0F0F0F0F, up >> 4 & 0x0F0F0F0F


@triton.jit
def _with_high_bits(low, fields, BITS: tl.constexpr):
    H: tl.constexpr = BITS - 4
    MASK: tl.constexpr = 0x30303030 if BITS == 6 else 0x10101010
    a = low[0] | fields << 4 & MASK
    b = low[1] | fields << (4 - H) & MASK
    c = low[2] | (fields << (4 - 2 * H) if H == 1 else fields) & MASK
    d = low[3] | (fields << 1 if H == 1 else fields >> 2) & MASK
    return a, b, c, d


@triton.jit
def _table_entries(codes, table):
    """Of eight codes: those of the lower 16 bits, and those of the upper ones. ``table``: four words of four bytes"""
    three = codes & 0x77777777
    which = codes >> 1 & 0x44444444 | 0x32103210  # a code's highest bit selects one of two bytes
    lower = permuted(permuted(table[0], table[1], three), permuted(table[2], table[3], three), which)
    three = three >> 16
    upper = permuted(permuted(table[0], table[1], three), permuted(table[2], table[3], three), which >> 16)
    return lower, upper


@triton.jit
def _table_by_place(low, up, table):
    """Entries of four words' places 0 and 1, and of their places 2 and 3."""
    even = tl.full([], 0x6420, tl.int32)
    odd = tl.full([], 0x7531, tl.int32)
    a, b = _table_entries(low, table)
    c, d = _table_entries(up, table)
    return permuted(a, b, even), permuted(a, b, odd), permuted(c, d, even), permuted(c, d, odd)


@triton.jit
def selectors(lane, half: tl.constexpr, HALVES: tl.constexpr, IS_TABLE: tl.constexpr):
    """With codes as they lie: which bytes of a place's activations stand where its codes do, and 0 elsewhere.

    A register has two words' codes of places 0 and 2, or of 1 and 3, alternating (0x4444: none is of this place); of a
    table, those of all places of one word. For the first two words of four: both registers; then for the others.
    """
    place = lane >> 3
    if IS_TABLE:
        shift = 4 * place
        none = 0x4444 - (4 << shift)
        a = none
        b = none + (1 << shift)
        c = none + (2 << shift)
        d = none + (3 << shift)
    else:
        is_first = place < 2
        near = tl.where(is_first, 0x4140, 0x1404)
        far = tl.where(is_first, 0x4342, 0x3424)
        is_even = (place & 1) == 0
        a = tl.where(is_even, near, 0x4444)
        b = tl.where(is_even, 0x4444, near)
        c = tl.where(is_even, far, 0x4444)
        d = tl.where(is_even, 0x4444, far)
    if HALVES == 2:  # a group is in two of the four lanes
        is_own = (lane & 3) >> 1 == half
        a = tl.where(is_own, a, 0x4444)
        b = tl.where(is_own, b, 0x4444)
        c = tl.where(is_own, c, 0x4444)
        d = tl.where(is_own, d, 0x4444)
    return a, b, c, d


@triton.jit
def scales_of(
    found, first: tl.constexpr, half: tl.constexpr, which,
    GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """Scales of both rows, and their minimums. ``first``: of the group's in the tuple; ``which``: byte of a word"""
    HALVES: tl.constexpr = 2 if GROUPS == 16 else 1
    low_0 = tl.zeros(which.shape, tl.float32)
    low_1 = low_0
    if FACTORS:
        word = found[first + (half if MINIMUM else 0)]
        if MINIMUM:
            byte = which & 0
            low_0 = byte_to_float(word, byte + 1)
            low_1 = byte_to_float(word, byte + 3)
        elif HALVES == 2:
            byte = (which & 0) + half
        else:
            byte = which
        if FACTORS == 2:
            scale_0 = fp8_to_float(word, byte)
            scale_1 = fp8_to_float(word, byte + 2)
        else:
            scale_0 = byte_to_float(word, byte)
            scale_1 = byte_to_float(word, byte + 2)
    else:
        scale_0 = pair_sum(found[first + 2 * half])
        scale_1 = pair_sum(found[first + 2 * half + 1])
        if MINIMUM:
            low_0 = pair_sum(found[first + 2 * (HALVES + half)])
            low_1 = pair_sum(found[first + 2 * (HALVES + half) + 1])
    return scale_0, scale_1, low_0, low_1
