"""Products of few tokens with matrices in the codes of quantised files, on the integer tensor cores.

Codes are small whole numbers, and so are activations (quant/whole_numbers.py): the sum of a group is exact, and its
scale is applied to the sum. No weight is rounded. With few tokens, where instructions are the bottleneck, that takes
half as many as products with weights in bfloat16 (linear_coded.py).

Kernels are written thread by thread: an array has an element a thread. A program has 16 rows, a thread of a warp two of
them, 2 g and 2 g + 1 for g = lane / 4. Half a tile, a part, has 32 columns in each of four places of its words; lane
q = lane % 4 has eight of the 32. An instruction multiplies 16 rows with eight columns of activations: of those the high
and the low bytes of four pairs of a token and a place, all others 0. So sums over the four instructions of a part are
those of a pair each, and a thread has the one of pair q: of one group, whose scale it applies. With one token the pairs
are its four places; with four tokens each place has sums of its own. Warps take parts in turn, and add up at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import PROCESSORS
from slipstream.runners.cuda.kernels.pdl import launch_dependents, pdl_options, wait_for_previous
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix
from slipstream.runners.cuda.kernels.quant.int8 import UNIT
from slipstream.runners.cuda.kernels.quant.whole_codes import (
    codes_as_they_lie,
    codes_by_place,
    group_of,
    permuted,
    scales_of,
    selectors,
)
from slipstream.runners.cuda.kernels.quant.whole_numbers import WholeNumbers

ROWS = tl.constexpr(16)  # of a program
MAX_WHOLE_TOKENS = 4

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_LOAD_16 = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];")
_LOAD_8 = tl.constexpr("ld.global.v2.b32 {$0,$1}, [$2];")
_LOAD_4 = tl.constexpr("ld.global.b32 $0, [$1];")


@triton.jit
def load_16(pointer):
    """16 bytes a thread, read once. pointer: to int32"""
    a, b, c, d = tl.inline_asm_elementwise(
        _LOAD_16, "=r,=r,=r,=r,l", [pointer], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )
    return a, b, c, d


@triton.jit
def load_8(pointer):
    a, b = tl.inline_asm_elementwise(_LOAD_8, "=r,=r,l", [pointer], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)
    return a, b


@triton.jit
def load_4(pointer):
    return tl.inline_asm_elementwise(_LOAD_4, "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def multiplied(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """One instruction of a warp: c + a b of 16 rows, 32 columns, and 8 columns of the result.

    As the instruction has them: a0 and a2 are row g (their bytes columns 4 q to 4 q + 3, and 16 further), a1 and a3
    row g + 8, b0 and b1 the same columns of column g; c0 and c1 are columns 2 q and 2 q + 1 of row g, c2 and c3 of row
    g + 8.
    """
    return tl.inline_asm_elementwise(
        _MMA, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def of_rows(pointer, first, second, stride):
    return pointer + first * stride, pointer + second * stride


@triton.jit
def pointers_of(
    words, high, scales, minimums, steps, first, second, row, part, q, num_tiles, scale_stride,
    TOKENS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """To what a thread takes of the first tile: words of both rows, high bits, scales of both rows at once, steps."""
    words = words.to(tl.pointer_type(tl.int32), bitcast=True) + (part * 16 + 4 * q)
    stride = num_tiles.to(tl.int64) * (64 if BITS == 8 else 32)
    found = of_rows(words, first, second, stride)
    if BITS == 5 or BITS == 6:
        HIGH: tl.constexpr = 8 * (BITS - 4)
        high = high.to(tl.pointer_type(tl.int32), bitcast=True) + 4 * (q if BITS == 6 else q & 1)
        stride = num_tiles.to(tl.int64) * HIGH
        found = found + of_rows(high, first, second, stride)
    PLACES: tl.constexpr = 4 // TOKENS
    for each in tl.static_range(TOKENS):
        group = group_of(part, each * PLACES + (q & (PLACES - 1)), GROUPS)
        line = group >> 1 if FACTORS and not MINIMUM else group  # two groups have their factors in one word
        where = (line + (q & 0)).to(tl.int64) * scale_stride + row
        if FACTORS:
            found = found + (scales.to(tl.pointer_type(tl.int32), bitcast=True) + (where >> 1),)
        else:
            found = found + (scales + where,)
            if MINIMUM:
                found = found + (minimums + where,)
    if FACTORS:
        found = found + (steps.to(tl.pointer_type(tl.int32), bitcast=True) + row,)
    return found


@triton.jit
def load_part(
    pointers, tile, scale_stride,
    TOKENS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """What is stored of a part of that tile: words and high bits of a row, of the other row, scales, steps."""
    HALVES: tl.constexpr = 2 if GROUPS == 16 else 1
    HIGH: tl.constexpr = BITS == 5 or BITS == 6
    at = tile * (64 if BITS == 8 else 32)
    first = load_16(pointers[0] + at)
    second = load_16(pointers[1] + at)
    if BITS == 8:
        first = first + load_16(pointers[0] + at + 32)
        second = second + load_16(pointers[1] + at + 32)
    if HIGH:
        at = tile * (8 * (BITS - 4))
        first = first + load_16(pointers[2] + at)
        second = second + load_16(pointers[3] + at)
    found = first + second
    SCALES: tl.constexpr = 4 if HIGH else 2
    if FACTORS:
        at = tile * ((GROUPS if MINIMUM else GROUPS // 2) * scale_stride >> 1)
        for each in tl.static_range(TOKENS):
            found = found + (load_4(pointers[SCALES + each] + at),)
            if MINIMUM and HALVES == 2:
                found = found + (load_4(pointers[SCALES + each] + at + (scale_stride >> 1)),)
        at = tile * ((1 + MINIMUM) * scale_stride)
        found = found + load_8(pointers[SCALES + TOKENS] + at)
        if MINIMUM:
            found = found + load_8(pointers[SCALES + TOKENS] + at + scale_stride)
    else:
        at = tile * (GROUPS * scale_stride)
        for each in tl.static_range(TOKENS * (1 + MINIMUM)):
            for half in tl.static_range(HALVES):
                found = found + load_8(pointers[SCALES + each] + at + half * scale_stride)
    return found


@triton.jit
def sums_of(
    upper, lower, x, x_far, begin, lane, each: tl.constexpr, half: tl.constexpr,
    TOKENS: tl.constexpr, AS_THEY_LIE: tl.constexpr, IS_TABLE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """The whole sums of both rows over the group of this thread's pair, plus ``begin``; as float32."""
    PLACES: tl.constexpr = 4 // TOKENS  # whose sums are side by side
    c0 = tl.zeros(lane.shape, tl.int32)
    c1 = begin
    c2 = c0
    c3 = begin
    if AS_THEY_LIE:
        which = selectors(lane, half, HALVES, IS_TABLE)
        for turn in tl.static_range(4):
            source = x if turn < 2 else x_far
            near = permuted(source, source & 0, which[turn % 2 * 2])
            far = permuted(source, source & 0, which[turn % 2 * 2 + 1])
            c0, c1, c2, c3 = multiplied(
                upper[turn], lower[turn], upper[4 + turn], lower[4 + turn], near, far, c0, c1, c2, c3
            )
    else:
        for turn in tl.static_range(PLACES):
            near = x
            far = x_far
            is_own = (lane >> 3 & (PLACES - 1)) == turn
            if HALVES == 2:  # a group is in two of the four lanes
                is_own = is_own & ((lane & 3) >> 1 == half)
            if PLACES > 1 or HALVES == 2:
                near = tl.where(is_own, x, 0)
                far = tl.where(is_own, x_far, 0)
            c0, c1, c2, c3 = multiplied(
                upper[each * PLACES + turn], lower[each * PLACES + turn],
                upper[4 + each * PLACES + turn], lower[4 + each * PLACES + turn], near, far, c0, c1, c2, c3,
            )  # fmt: skip
    return ((c0 << 8) + c1).to(tl.float32), ((c2 << 8) + c3).to(tl.float32)


@triton.jit
def add_part(
    totals, found, inputs, tile, num_tiles, part, lane, table,
    TOKENS: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, GROUPS: tl.constexpr,
    FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """Totals of both rows with a part's products. ``inputs``: as ``load_inputs``"""
    PLACES: tl.constexpr = 4 // TOKENS
    HALVES: tl.constexpr = 2 if GROUPS == 16 else 1
    EACH: tl.constexpr = 4 if BITS == 4 else 8
    FIRST: tl.constexpr = 2 * EACH  # of the scales
    SCALES: tl.constexpr = (HALVES if MINIMUM else 1) if FACTORS else 2 * HALVES * (1 + MINIMUM)  # of a group
    STEPS: tl.constexpr = FIRST + TOKENS * SCALES  # where there are factors
    AS_THEY_LIE: tl.constexpr = TOKENS == 1 and (BITS == 4 or BITS == 8)
    q = lane & 3
    if AS_THEY_LIE:
        upper = codes_as_they_lie(found, 0, BITS, TABLE, table)
        lower = codes_as_they_lie(found, EACH, BITS, TABLE, table)
    else:
        upper = codes_by_place(found, 0, part, q, BITS, TABLE, table)
        lower = codes_by_place(found, EACH, part, q, BITS, TABLE, table)
    scaled_0 = tl.zeros(lane.shape, tl.float32)
    scaled_1 = scaled_0
    low_0 = scaled_0
    low_1 = scaled_0
    for each in tl.static_range(TOKENS):  # as many sums of four instructions
        which = group_of(part, each * PLACES + (q & (PLACES - 1)), GROUPS) & 1
        for half in tl.static_range(HALVES):
            scale_0, scale_1, minimum_0, minimum_1 = scales_of(
                found, FIRST + each * SCALES, half, which, GROUPS, FACTORS, MINIMUM
            )
            group_sum = inputs[4 * each + 2 + half]
            if HALVES == 1:
                group_sum += inputs[4 * each + 3]
            sum_0, sum_1 = sums_of(
                upper, lower, inputs[4 * each], inputs[4 * each + 1], -OFFSET * group_sum, lane, each, half,
                TOKENS, AS_THEY_LIE, TABLE > 0, HALVES,
            )  # fmt: skip
            scaled_0 += sum_0 * scale_0
            scaled_1 += sum_1 * scale_1
            if MINIMUM:
                low_0 += group_sum.to(tl.float32) * minimum_0
                low_1 += group_sum.to(tl.float32) * minimum_1
    if FACTORS:
        scaled_0 *= found[STEPS].to(tl.float32, bitcast=True)
        scaled_1 *= found[STEPS + 1].to(tl.float32, bitcast=True)
        if MINIMUM:
            low_0 *= found[STEPS + 2].to(tl.float32, bitcast=True)
            low_1 *= found[STEPS + 3].to(tl.float32, bitcast=True)
    if MINIMUM:  # in the unit of the others
        scaled_0 += low_0 * (1.0 if FACTORS == 2 else UNIT)
        scaled_1 += low_1 * (1.0 if FACTORS == 2 else UNIT)
    unit = tl.where(tile < num_tiles, inputs[4 * TOKENS].to(tl.float32, bitcast=True), 0.0)
    return totals[0] + scaled_0 * unit, totals[1] + scaled_1 * unit


@triton.jit
def load_inputs(numbers, sums, units, tile, TOKENS: tl.constexpr, SUMMED: tl.constexpr):
    """For each sum numbers, those of four columns further, and two sums of numbers; the unit."""
    PLACES: tl.constexpr = 4 // TOKENS
    found = ()
    for each in tl.static_range(TOKENS):
        found = found + load_8(numbers + tile * 128 + each * PLACES * 16)
        if SUMMED:
            found = found + load_8(sums + tile * 16 + each * PLACES * 2)
        else:
            found = found + (tile & 0, tile & 0)
    return found + (load_4(units + tile),)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "table_0", "table_1", "table_2", "table_3"])
def _whole(
    numbers, units, sums, words, high, scales, minimums, steps, out, add, bias,
    num_tokens, num_rows, row_stride, scale_stride, num_tiles, table_0, table_1, table_2, table_3,
    WARPS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    PLACES: tl.constexpr = 4 // TOKENS
    TILES: tl.constexpr = WARPS // 2  # at once
    thread = tl.arange(0, 32 * WARPS)
    lane = thread & 31
    q = lane & 3
    part = (thread >> 5) & 1
    tile = thread >> 6
    row = tl.program_id(0) * ROWS + 2 * (lane >> 2)
    last = num_tiles - 1
    table = (table_0, table_1, table_2, table_3)
    pointers = pointers_of(
        words, high, scales, minimums, steps, tl.minimum(row, num_rows - 1), tl.minimum(row + 1, num_rows - 1), row,
        part, q, num_tiles, scale_stride, TOKENS, BITS, GROUPS, FACTORS, MINIMUM,
    )  # fmt: skip
    # Weights are constant: they may be fetched before the wait.
    ahead = load_part(pointers, tl.minimum(tile, last), scale_stride, TOKENS, BITS, GROUPS, FACTORS, MINIMUM)
    wait_for_previous()
    launch_dependents()
    # Of activations a thread has those of its column, of the result those of its pair. The last token fills up.
    pair = lane >> 3
    token = tl.minimum(pair // PLACES, num_tokens - 1)
    own = tl.minimum(q // PLACES, num_tokens - 1)
    numbers = numbers.to(tl.pointer_type(tl.int32), bitcast=True)
    numbers += token * num_tiles * 128 + part * 64 + (pair & (PLACES - 1)) * 16 + (lane & 7) * 2
    sums += own * num_tiles * 16 + part * 8 + (q & (PLACES - 1)) * 2
    units = units.to(tl.pointer_type(tl.int32), bitcast=True) + own * num_tiles
    totals = (tl.zeros([32 * WARPS], tl.float32), tl.zeros([32 * WARPS], tl.float32))
    for _ in range(tl.cdiv(num_tiles, TILES)):
        found = ahead
        inputs = load_inputs(numbers, sums, units, tl.minimum(tile, last), TOKENS, OFFSET > 0 or MINIMUM > 0)
        at = tl.minimum(tile + TILES, last)
        ahead = load_part(pointers, at, scale_stride, TOKENS, BITS, GROUPS, FACTORS, MINIMUM)
        totals = add_part(
            totals, found, inputs, tile, num_tiles, part, lane, table,
            TOKENS, BITS, OFFSET, TABLE, GROUPS, FACTORS, MINIMUM,
        )  # fmt: skip
        tile += TILES
    rows = (tl.program_id(0) * ROWS + 2 * tl.arange(0, 8))[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    for which in tl.static_range(2):
        # Of all warps, and of a token's places.
        total = tl.sum(tl.sum(totals[which].reshape([WARPS, 8, TOKENS, PLACES]), axis=3), axis=0)
        total *= 1 / (UNIT * UNIT) if FACTORS == 1 else 1 / UNIT
        inside = (rows + which < num_rows) & (token < num_tokens)
        where = token * row_stride + rows + which
        if bias is not None:
            total += tl.load(bias + rows + which, mask=rows + which < num_rows, other=0.0).to(tl.float32)
        if add is not None:
            total += tl.load(add + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


def tokens_side_by_side(num_tokens: int) -> int:
    """What a product of so many tokens is compiled for."""
    return 1 << (num_tokens - 1).bit_length()


def warps_of(blocks: int) -> int:
    """Enough of them on all processors, and few blocks end sooner if more warps share them."""
    return 4 if blocks > 4 * PROCESSORS else 8 if blocks > PROCESSORS else 16


def whole_linear(
    x: WholeNumbers,
    matrix: CodedMatrix,
    out: Tensor,  # [tokens <= MAX_WHOLE_TOKENS, rows], the columns of a row neighbours
    add: Tensor | None = None,  # as ``out``, with the same strides
    bias: Tensor | None = None,  # [rows]
) -> None:
    tokens, blocks = tokens_side_by_side(x.num_tokens), triton.cdiv(matrix.num_rows, ROWS.value)
    assert tokens <= MAX_WHOLE_TOKENS
    assert x.units.shape[1] == matrix.num_tiles
    assert out.stride(1) == 1
    assert add is None or add.stride() == out.stride()
    table = matrix.table.to_bytes(16, "little")
    quarters = (int.from_bytes(table[at : at + 4], "little", signed=True) for at in range(0, 16, 4))
    warps = warps_of(blocks)
    # With fewer registers what is fetched ahead comes later, with more there is room for fewer warps (log 237).
    registers = 96 if matrix.table and tokens == 1 and warps <= 8 else 80
    _whole[(blocks,)](
        x.numbers, x.units, x.sums, matrix.words, matrix.high, matrix.scales, matrix.minimums, matrix.steps,
        out, add, bias, x.num_tokens, matrix.num_rows, out.stride(0), matrix.scales.stride(0), matrix.num_tiles,
        *quarters, WARPS=warps, TOKENS=tokens, **matrix.constants, num_warps=warps, maxnreg=registers,
        **pdl_options(out.device),
    )  # fmt: skip
