"""Matrices in the codes of quantised files: a weight is value(code) * scale + minimum, with a scale a group of columns.

Four codes make a word of 16 bits, as in int4.py: word c of every ``TILE`` columns holds columns c, c + 64, c + 128 and
c + 192. Codes of 5 or 6 bits have their high bits in a plane of their own, codes of 8 bits are two in a word, columns c
and c + 128. A code becomes its value in bfloat16, exactly, and then a weight by one multiplication with its group's
factor, or two with both parts of its scale: rounded once. Scales in float32 would cost three instructions a weight.

Steps of 256 columns multiply finished sums in float32, and so does a minimum: it is a product of its own, with the
minimum's factor as weights, the same for all columns of a group. It takes no unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.code_layout import BIAS, TILE, CodeLayout, padded_rows
from slipstream.runners.cuda.kernels.quant.code_values import factors_of, pair_sum, spread, values_of_codes
from slipstream.runners.cuda.kernels.quant.quantize import rows_to_unpack

_ROWS = 32  # a program dequantizes


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    layout: CodeLayout
    width: int  # columns
    words: Tensor  # int16 [rows, words], contiguous
    high: Tensor | None  # int16 [rows, words]: the high bits of codes of 5 or 6
    # Factors over UNIT: int16 [rows of scales, rows], a byte each, biased; or FP8, as they are. Pairs: int32 [groups,
    # rows], times UNIT.
    scales: Tensor
    minimums: Tensor | None  # int32 [groups, rows]: pairs
    steps: Tensor | None  # float32 [tiles * (1 or 2), rows]: of scales and of minimums, times what others are over

    @property
    def num_rows(self) -> int:
        return self.words.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.layout.num_tiles(self.width)

    @property
    def num_bytes(self) -> int:
        return self.layout.stored_bytes((self.num_rows, self.width))

    @property
    def table(self) -> int:
        """The bytes of its table as one number, the first lowest; 0: it has none."""
        return int.from_bytes(bytes(value + BIAS for value in self.layout.table), "little")

    @property
    def constants(self) -> dict[str, int]:
        """Of kernels."""
        layout = self.layout
        return {
            "BITS": layout.bits, "OFFSET": layout.offset, "TABLE": self.table, "GROUPS": layout.groups,
            "FACTORS": int(layout.has_factors) + int(layout.float_factors), "MINIMUM": int(layout.has_minimum),
        }  # fmt: skip

    def first(self, num_rows: int) -> CodedMatrix:
        """A view."""
        high = None if self.high is None else self.high[:num_rows]
        minimums, steps = (None if each is None else each[:, :num_rows] for each in (self.minimums, self.steps))
        return replace(
            self, words=self.words[:num_rows], high=high, scales=self.scales[:, :num_rows], minimums=minimums,
            steps=steps,
        )  # fmt: skip

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """All rows, or the rows ``ids``, dequantized. [rows, columns]"""
        num_rows = self.num_rows if ids is None else ids.shape[0]
        if out is None:
            out = torch.empty(num_rows, self.width, dtype=dtype, device=self.words.device)
        steps, minimums = self.steps, self.minimums
        _weights_kernel[(triton.cdiv(num_rows, _ROWS), self.num_tiles)](
            self.words, self.high, self.scales, minimums, steps, ids, out, num_rows, self.width,
            self.words.shape[1], 0 if self.high is None else self.high.shape[1], self.scales.stride(0),
            N=_ROWS, K=TILE, **self.constants, num_warps=4, **pdl_options(out.device),
        )  # fmt: skip
        return out


def empty(layout: CodeLayout, shape: Sequence[int], device: torch.device) -> CodedMatrix:
    num_rows, width = shape
    tiles, padded = layout.num_tiles(width), padded_rows(num_rows)

    def of_rows(num: int, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(tiles * num, padded, dtype=dtype, device=device)
        whole[:, num_rows:] = 0  # read with the last row, and not used
        return whole[:, :num_rows]

    def plane(num_words: int) -> Tensor:
        return torch.empty(num_rows, tiles * num_words, dtype=torch.int16, device=device)

    has_pairs = layout.has_minimum and not layout.has_factors
    return CodedMatrix(
        layout,
        width,
        plane(layout.words),
        plane(layout.high_words) if layout.high_bits else None,
        of_rows(layout.scale_rows, torch.int16 if layout.has_factors else torch.int32),
        of_rows(layout.groups, torch.int32) if has_pairs else None,
        of_rows(1 + layout.has_minimum, torch.float32) if layout.has_factors else None,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _weights_kernel(
    words, high, scales, minimums, steps, ids, out, num_rows, width, row_words, row_high, scale_stride,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    GROUPS: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    launch_dependents_and_wait()
    out_row, inside, row = rows_to_unpack(ids, num_rows, N)
    tile = tl.program_id(1)
    WORDS: tl.constexpr = K // 2 if BITS == 8 else K // 4
    found = tl.load(words + row[:, None] * row_words + tile * WORDS + tl.arange(0, WORDS)[None, :], inside[:, None], 0)
    if high is not None:
        HIGH: tl.constexpr = (BITS - 4) * (K // 16)
        high = tl.load(high + row[:, None] * row_high + tile * HIGH + tl.arange(0, HIGH)[None, :], inside[:, None], 0)
    values = values_of_codes(found, high, tl.float32, BITS, OFFSET, TABLE, False)
    SCALES: tl.constexpr = GROUPS // 2 if FACTORS and not MINIMUM else GROUPS
    where = (tile * SCALES + tl.arange(0, SCALES)).to(tl.int64)[:, None] * scale_stride + row[None, :]
    found_scales = tl.load(scales + where, inside[None, :], 0)
    if FACTORS:
        factors, minimum_factors = factors_of(found_scales.T, tl.float32, FACTORS, MINIMUM)
        at = steps + (tile * (1 + MINIMUM)).to(tl.int64) * scale_stride + row
        made = values * spread(factors * tl.load(at, inside, 0.0)[:, None], K)
        if MINIMUM:
            made += spread(minimum_factors * tl.load(at + scale_stride, inside, 0.0)[:, None], K)
    else:
        made = values * spread(pair_sum(found_scales.T), K)
        if MINIMUM:
            made += spread(pair_sum(tl.load(minimums + where, inside[None, :], 0).T), K)
    column = tile * K + tl.arange(0, K)
    target = out + out_row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=inside[:, None] & (column < width)[None, :])
