"""Matrices in 8 bits: a weight is code * scale, a code from -127 to 127, a float32 scale for each row (output).

Codes lie in pairs, biased by 128, in words of 16 bits: of every ``tile`` columns, word c holds column c in its low
byte and column c + tile / 2 in its high one. So the columns of a tile's low bytes are neighbours, and so are those of
its high bytes, and a thread loads its share for the tensor cores as words and unpacks it at one instruction a weight:
plain bytes cost three or four.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.quantize import slabs

TILE = 128
MAX_CODE = 127  # the largest code
BIAS = 128
UNIT = tl.constexpr(64.0)  # kernels compute with codes over this: it saves them an instruction
_BLOCK = 512  # words a program dequantizes

# Bits of a small whole number, read as bfloat16, are that number times 2^-133: denormal or not. Times 2^127, less 2.
_BF16_HALVES = tl.constexpr("""{
    .reg .b32 low, high, unit, bias;
    mov.b32 unit, 0x7f007f00;
    mov.b32 bias, 0xc000c000;
    and.b32 low, $2, 0x00ff00ff;
    prmt.b32 high, $2, 0, 0x4341;
    fma.rn.bf16x2 $0, low, unit, bias;
    fma.rn.bf16x2 $1, high, unit, bias;
}""")
# After the bits of 1024 as float16, a byte adds itself. Times 2^-6, less 18.
_F16_HALVES = tl.constexpr("""{
    .reg .b32 low, high, unit, bias;
    mov.b32 unit, 0x24002400;
    mov.b32 bias, 0xcc80cc80;
    lop3.b32 low, $2, 0x00ff00ff, 0x64006400, 0xea;
    prmt.b32 high, $2, 0x64646464, 0x4341;
    fma.rn.f16x2 $0, low, unit, bias;
    fma.rn.f16x2 $1, high, unit, bias;
}""")


@triton.jit
def halves(words, dtype: tl.constexpr):
    """The codes in the low and in the high bytes, over UNIT, in that type: exact."""
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _BF16_HALVES, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _F16_HALVES, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = (((words & 255) - 128).to(tl.float32) / UNIT).to(dtype)
        high = (((words >> 8 & 255) - 128).to(tl.float32) / UNIT).to(dtype)
    return low, high


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    words: Tensor  # int16 [rows, columns / 2, rounded up to whole tiles], contiguous
    scale: Tensor  # float32 [rows]
    width: int  # columns
    tile: int = TILE

    kind: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    kept: ClassVar[None] = None
    fp8_layout: ClassVar[int] = 0

    @property
    def at_once(self) -> int:
        return self.tile // 2

    @property
    def num_rows(self) -> int:
        return self.words.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.words.shape[1] * 2 // self.tile

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.scale.nbytes

    def kernel_scales(self, num_rows: int) -> Tensor:
        return self.scale

    def first(self, num_rows: int) -> Int8Matrix:
        return replace(self, words=self.words[:num_rows], scale=self.scale[:num_rows])

    def reorder(self, rows: Tensor) -> None:
        self.words.copy_(self.words[rows])
        self.scale.copy_(self.scale[rows])

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        row_words = self.words.shape[1]
        num_rows = self.num_rows if ids is None else ids.shape[0]
        if out is None:
            out = torch.empty(num_rows, self.width, dtype=dtype, device=self.words.device)
        _weights_kernel[(num_rows, triton.cdiv(row_words, _BLOCK))](
            self.words, self.scale, ids, out, self.width, row_words, K=self.tile, BLOCK=_BLOCK, num_warps=4,
            **pdl_options(out.device),
        )  # fmt: skip
        return out


def num_words(width: int, tile: int = TILE) -> int:
    return -(-width // tile) * tile // 2


def stored_bytes(shape: Sequence[int]) -> int:
    num_rows, width = shape
    return num_rows * (2 * num_words(width) + 4)


def quantize(parts: Iterable[Tensor], shape: Sequence[int], device: torch.device, tile: int = TILE) -> Int8Matrix:
    """One matrix of all parts, stacked along the output: each is [rows, columns] of any float type."""
    num_rows, width = shape
    words = torch.empty(num_rows, num_words(width, tile), dtype=torch.int16, device=device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=device)
    for rows, weights in slabs(parts, num_rows, device):
        scale[rows] = weights.abs().amax(dim=1) / MAX_CODE
        steps = weights / torch.where(scale[rows] > 0, scale[rows], 1.0)[:, None]
        words[rows] = _paired(steps.round_().clamp_(-MAX_CODE, MAX_CODE), tile)
    return Int8Matrix(words, scale, width, tile)


def _paired(codes: Tensor, tile: int) -> Tensor:
    biased = torch.nn.functional.pad(codes + BIAS, (0, -codes.shape[1] % tile), value=BIAS).to(torch.uint8)
    low_high = biased.view(codes.shape[0], -1, 2, tile // 2).transpose(2, 3)
    return low_high.reshape(codes.shape[0], -1).view(torch.int16)


@triton.jit(do_not_specialize=["width"])
def _weights_kernel(words, scale, ids, out, width, row_words, K: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if ids is not None:
        row = tl.load(ids + out_row).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(words + row * row_words + index, mask=index < row_words, other=0)
    factor = tl.load(scale + row)
    column = index // (K // 2) * K + index % (K // 2)
    target = out + out_row * width + column
    low = ((found & 255) - 128).to(tl.float32) * factor
    high = ((found >> 8 & 255) - 128).to(tl.float32) * factor
    tl.store(target, low.to(out.dtype.element_ty), mask=(index < row_words) & (column < width))
    tl.store(target + K // 2, high.to(out.dtype.element_ty), mask=(index < row_words) & (column + K // 2 < width))
