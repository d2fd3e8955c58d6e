"""Matrices in 4 bits: a weight is code * scale + zero, a code from 0 to 15; every ``GROUP`` columns of a row have a
scale and a zero point (the weight of code 0), both bfloat16. That makes 4.5 bits a weight.

Four codes make a word of 16 bits: word c of every ``TILE`` columns holds columns c, c + 64, c + 128 and c + 192, from
its lowest bits up. So a tile's four groups are the first, second, third and fourth codes of its words, and a thread
that holds two neighbouring words, as the tensor cores want them, has two neighbouring columns of each group. It makes
two codes into weights by two instructions, one that masks their bits and one that multiplies and adds; one more,
for eight codes, brings down the high bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.quantize import (
    UNIT,
    UNIT_BITS,
    concatenated,
    plain,
    rows_to_unpack,
    slabs,
)

TILE = 256
GROUP = TILE // 4
MAX_CODE = 15  # the largest code
# Bits of a small whole number, read as bfloat16, are that number times 2^-133: denormal or not. The factor is therefore
# stored as scale * 2^133 / UNIT, and for codes in the upper half of a byte as a sixteenth of that.
FACTOR_BITS = 133 - UNIT_BITS
_ROWS = 32  # a program dequantizes

# Four codes of each of two words as they are: times 2^-133, and times 2^-129.
FOUR_RAW_BITS = tl.constexpr("""{
    .reg .b32 high;
    shr.u32 high, $4, 8;
    and.b32 $0, $4, 0x000f000f;
    and.b32 $1, $4, 0x00f000f0;
    and.b32 $2, high, 0x000f000f;
    and.b32 $3, high, 0x00f000f0;
}""")
# Two columns of one row have the same scales: the compiler sees it, and takes both halves of them as they are.
_WEIGHTS = tl.constexpr("""{
    .reg .b16 factor0, factor1, zero0, zero1;
    .reg .b32 factor, zero;
    mov.b32 {factor0, zero0}, $2;
    mov.b32 {factor1, zero1}, $3;
    mov.b32 factor, {factor0, factor1};
    mov.b32 zero, {zero0, zero1};
    fma.rn.bf16x2 $0, $1, factor, zero;
}""")


@triton.jit
def weights_of(words, scales, dtype: tl.constexpr):
    """Dequantized whole tiles, rounded once to that type. words: [N, W], scales: int32 [4, N] -> [N, 4 W]

    Over UNIT, except in float16, which would lose them: see ``plain``.
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    found = tl.broadcast_to(scales.T[:, :, None], [N, 4, W]).reshape([N, 4 * W])
    if dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            FOUR_RAW_BITS, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
        return tl.inline_asm_elementwise(
            _WEIGHTS, "=r,r,r,r", [concatenated(a, b, c, d), found], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    bits = concatenated(words & 0x0F, words & 0xF0, words >> 8 & 0x0F, words >> 8 & 0xF0).to(tl.float32)
    factor = (found << 16).to(tl.float32, bitcast=True) * 2.0**-100  # in two steps: 2^-133 is denormal
    made = bits * (factor * 2.0**-33) + (found & -65536).to(tl.float32, bitcast=True)
    return (made * UNIT if dtype == tl.float16 else made).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    words: Tensor  # int16 [rows, columns / 4, rounded up to whole tiles], contiguous
    # Factor, in the low half, and zero point / UNIT, both bfloat16; a group's start at a multiple of 16 bytes.
    scales_zeros: Tensor  # int32 [groups, rows]
    width: int  # columns

    kind: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    kept: ClassVar[None] = None
    fp8_layout: ClassVar[int] = 0
    tile: ClassVar[int] = TILE
    at_once: ClassVar[int] = TILE

    @property
    def num_rows(self) -> int:
        return self.words.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.words.shape[1] // GROUP

    @property
    def num_bytes(self) -> int:
        return stored_bytes((self.num_rows, self.width))

    def kernel_scales(self, num_rows: int) -> TensorDescriptor:
        both = self.scales_zeros
        return TensorDescriptor(both, list(both.shape), list(both.stride()), [4, num_rows])

    def first(self, num_rows: int) -> Int4Matrix:
        return replace(self, words=self.words[:num_rows], scales_zeros=self.scales_zeros[:, :num_rows])

    def reorder(self, rows: Tensor) -> None:
        self.words.copy_(self.words[rows])
        self.scales_zeros.copy_(self.scales_zeros[:, rows])

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        num_rows = self.num_rows if ids is None else ids.shape[0]
        if out is None:
            out = torch.empty(num_rows, self.width, dtype=dtype, device=self.words.device)
        _weights_kernel[(triton.cdiv(num_rows, _ROWS), self.num_tiles)](
            self.words, self.scales_zeros, ids, out, num_rows, self.width,
            self.words.shape[1], self.scales_zeros.stride(0), N=_ROWS, W=GROUP, num_warps=4, **pdl_options(out.device),
        )  # fmt: skip
        return out


def num_tiles(width: int) -> int:
    return -(-width // TILE)


def stored_bytes(shape: Sequence[int]) -> int:
    num_rows, width = shape
    return num_tiles(width) * (2 * GROUP * num_rows + 4 * 4 * _padded(num_rows))


def _padded(num_rows: int) -> int:
    """Rows, padded: each group's scales start where the copy engine can read."""
    return -(-num_rows // 4) * 4


def quantize(parts: Iterable[Tensor], shape: Sequence[int], device: torch.device) -> Int4Matrix:
    """One matrix of all parts, stacked along the output: each is [rows, columns] of any float type."""
    num_rows, width = shape
    tiles = num_tiles(width)
    words = torch.empty(num_rows, tiles * GROUP, dtype=torch.int16, device=device)
    scales_zeros = torch.empty(tiles * 4, _padded(num_rows), dtype=torch.int32, device=device)[:, :num_rows]
    for rows, weights in slabs(parts, num_rows, device):
        groups = torch.nn.functional.pad(weights, (0, -width % TILE)).view(weights.shape[0], tiles * 4, GROUP)
        scale, zero = _scale_and_zero(groups)
        words[rows] = _packed(_codes(groups, scale, zero))
        scales_zeros[:, rows] = _stored(scale, zero).T
    return Int4Matrix(words, scales_zeros, width)


def _scale_and_zero(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As stored, in float32; 0 is always in a group's range, so scale and zero point are of similar size."""
    low, high = groups.aminmax(dim=2)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    return ((high - low) / MAX_CODE).bfloat16().float(), low.bfloat16().float()


def _codes(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    steps = (groups - zero[..., None]) / torch.where(scale > 0, scale, 1.0)[..., None]
    return steps.round_().clamp_(0, MAX_CODE).to(torch.uint8)


def _packed(codes: Tensor) -> Tensor:
    """[rows, groups, GROUP] -> [rows, words]"""
    first, second, third, fourth = codes.view(codes.shape[0], -1, 4, GROUP).unbind(2)
    low_high = torch.stack((first | second << 4, third | fourth << 4), dim=-1)  # bytes of a word
    return low_high.flatten(1).view(torch.int16)


def _stored(scale: Tensor, zero: Tensor) -> Tensor:
    """[rows, groups]"""
    factor = scale * 2.0**FACTOR_BITS
    factor[:, 1::2] /= 16
    return torch.stack((factor, zero * 2.0**-UNIT_BITS), dim=-1).bfloat16().view(torch.int32).squeeze(-1)


@triton.jit(do_not_specialize=["num_rows"])
def _weights_kernel(
    words, scales_zeros, ids, out, num_rows, width, row_words, group_stride, N: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    launch_dependents_and_wait()
    out_row, inside, row = rows_to_unpack(ids, num_rows, N)
    tile = tl.program_id(1)
    word = tile * W + tl.arange(0, W)
    group = (tile * 4 + tl.arange(0, 4)).to(tl.int64)
    found = tl.load(words + row[:, None] * row_words + word[None, :], mask=inside[:, None], other=0)
    scales = tl.load(scales_zeros + group[:, None] * group_stride + row[None, :], mask=inside[None, :], other=0)
    dtype: tl.constexpr = out.dtype.element_ty
    made = plain(weights_of(found, scales, dtype).to(tl.float32), dtype)
    column = tile * (4 * W) + tl.arange(0, 4 * W)
    target = out + out_row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(target, made.to(dtype), mask=inside[:, None] & (column < width)[None, :])
