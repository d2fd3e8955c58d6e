"""Matrices in FP8, as checkpoints hold them: a weight is a code (e4m3) times the scale of ``TILE`` columns of its row.

A code's exponent and mantissa, moved to where bfloat16 has its own, are the code's value times 2^-120: one
multiplication by the stored factor makes two weights. Of every ``TILE`` columns, word c of 16 bits holds
columns c and c + 64, as in int8.py, but so that few bits are left to move: those of the first are where bfloat16 wants
them, those of the second lie in the gaps between, four bits too low or four too high.

Factors are bfloat16, or float32 where the checkpoint's scales need it. Such a factor is split into two bfloat16: two
instructions more for four weights.

That is the layout ``MOVED``. In the layout ``BYTES`` the two codes are a word's two bytes, as the FP8 tensor cores take
them (decision 22): two instructions more for four weights.

Rows that a checkpoint keeps in more bits may follow the rows in codes: they are read as they are.
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

from slipstream.load.tensor import FP8_GROUP
from slipstream.runners.cuda.kernels.matmul.product import split
from slipstream.runners.cuda.kernels.pdl import launch_dependents_and_wait, pdl_options
from slipstream.runners.cuda.kernels.quant.quantize import UNIT_BITS, plain, rows_to_unpack, slabs

TILE = FP8_GROUP
MAX_VALUE = 448.0  # the largest code's value
FACTOR_BITS = 120 - UNIT_BITS  # a scale is stored times two to the power of this
MOVED, BYTES = 1, 2  # layouts; 0 is for matrices that are not in FP8
_BYTES = tl.constexpr(BYTES)
_ROWS = 32  # a program dequantizes

_MOVED_CODES = """{
    .reg .b32 low, high, rest, zero;
    mov.b32 zero, 0x80008000;
    and.b32 low, $2, 0x87f087f0;
    shl.b32 high, $2, 4;
    and.b32 high, high, 0x80f080f0;
    shr.u32 rest, $2, 4;
    lop3.b32 high, rest, 0x07000700, high, 0xea;"""
_BYTE_CODES = """{
    .reg .b32 low, high, rest, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 low, $2, 4;
    and.b32 low, low, 0x07f007f0;
    shl.b32 rest, $2, 8;
    lop3.b32 low, rest, 0x80008000, low, 0xea;
    shr.u32 high, $2, 4;
    and.b32 high, high, 0x07f007f0;
    lop3.b32 high, $2, 0x80008000, high, 0xea;"""
_TIMES = """
    fma.rn.bf16x2 $0, low, $3, zero;
    fma.rn.bf16x2 $1, high, $3, zero;
}"""
_TIMES_BOTH = """
    fma.rn.bf16x2 rest, low, $4, zero;
    fma.rn.bf16x2 $0, low, $3, rest;
    fma.rn.bf16x2 rest, high, $4, zero;
    fma.rn.bf16x2 $1, high, $3, rest;
}"""
_WEIGHTS, _WEIGHTS_OF_BYTES = tl.constexpr(_MOVED_CODES + _TIMES), tl.constexpr(_BYTE_CODES + _TIMES)
_WIDE, _WIDE_OF_BYTES = tl.constexpr(_MOVED_CODES + _TIMES_BOTH), tl.constexpr(_BYTE_CODES + _TIMES_BOTH)


@triton.jit
def coded_weights(words, factors, dtype: tl.constexpr, LAYOUT: tl.constexpr):
    """Dequantized codes of the tile's first and of its second half, rounded once to that type; see ``plain``.

    words: [N, W], factors: [1, N], bfloat16 or float32 -> two of [N, W]
    """
    factor = tl.broadcast_to(factors.T, words.shape)
    if dtype == tl.bfloat16 and factors.dtype == tl.float32:
        wide: tl.constexpr = _WIDE_OF_BYTES if LAYOUT == _BYTES else _WIDE
        large, small = split(factors.T)
        large = tl.broadcast_to(large, words.shape)
        small = tl.broadcast_to(small, words.shape)
        low, high = tl.inline_asm_elementwise(
            wide, "=r,=r,r,r,r", [words, large, small], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif dtype == tl.bfloat16:
        made: tl.constexpr = _WEIGHTS_OF_BYTES if LAYOUT == _BYTES else _WEIGHTS
        low, high = tl.inline_asm_elementwise(
            made, "=r,=r,r,r", [words, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        bits = words.to(tl.int32)
        if LAYOUT == _BYTES:
            low = _weight((bits << 8 & 0x8000) | (bits << 4 & 0x07F0), factor, dtype)
            high = _weight((bits & 0x8000) | (bits >> 4 & 0x07F0), factor, dtype)
        else:
            low = _weight(bits & 0x87F0, factor, dtype)
            high = _weight((bits << 4 & 0x80F0) | (bits >> 4 & 0x0700), factor, dtype)
    return low, high


@triton.jit
def _weight(bits, factor, dtype: tl.constexpr):
    """``bits``: of a bfloat16, in an int32"""
    made = (bits << 16).to(tl.float32, bitcast=True) * factor.to(tl.float32)
    return (plain(made, tl.bfloat16) if dtype == tl.float16 else made).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    words: Tensor  # int16 [rows in codes, columns / 2], contiguous
    factors: Tensor  # bfloat16 or float32 [tiles, rows in codes]; a tile's start at a multiple of 16 bytes
    kept: Tensor | None = None  # [rows, columns], contiguous: those after the rows in codes
    fp8_layout: int = MOVED
    in_blocks: bool = False  # see ``has_blocks``

    kind: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8
    tile: ClassVar[int] = TILE
    at_once: ClassVar[int] = TILE // 2

    @property
    def width(self) -> int:
        return self.words.shape[1] * 2

    @property
    def num_rows(self) -> int:
        return self.words.shape[0] + (0 if self.kept is None else self.kept.shape[0])

    @property
    def num_tiles(self) -> int:
        return self.words.shape[1] * 2 // TILE

    @property
    def num_bytes(self) -> int:
        coded = stored_bytes((self.words.shape[0], self.width), wide=self.factors.dtype == torch.float32)
        return coded + (0 if self.kept is None else self.kept.nbytes)

    @property
    def codes(self) -> Tensor:
        """As the FP8 tensor cores take them: of each tile columns 0, 64, 1, 65, ... float8 [rows in codes, columns]"""
        assert self.fp8_layout == BYTES
        return self.words.view(torch.float8_e4m3fn)

    def kernel_scales(self, num_rows: int) -> TensorDescriptor:
        assert num_rows >= 64, "tiles of factors follow each other, each at a multiple of 128 bytes"
        return TensorDescriptor(self.factors, list(self.factors.shape), list(self.factors.stride()), [1, num_rows])

    def first(self, num_rows: int) -> Fp8Matrix:
        assert num_rows <= self.words.shape[0]
        return replace(self, words=self.words[:num_rows], factors=self.factors[:, :num_rows], kept=None)

    def reorder(self, rows: Tensor) -> None:
        assert self.kept is None
        self.words.copy_(self.words[rows])
        self.factors.copy_(self.factors[:, rows])
        object.__setattr__(self, "in_blocks", self.in_blocks and self.words.shape[0] % TILE == 0)

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        num_coded = self.words.shape[0]
        num_rows = self.num_rows if ids is None else ids.shape[0]
        if out is None:
            out = torch.empty(num_rows, self.width, dtype=dtype, device=self.words.device)
        if ids is None and self.kept is not None:
            out[num_coded:].copy_(self.kept)
            num_rows = num_coded
        assert ids is None or self.kept is None
        _weights_kernel[(triton.cdiv(num_rows, _ROWS), self.num_tiles)](
            self.words, self.factors, ids, out, num_rows, self.width, self.factors.stride(0), N=_ROWS, K=TILE,
            LAYOUT=self.fp8_layout, num_warps=4, **pdl_options(out.device),
        )  # fmt: skip
        return out


def stored_bytes(shape: Sequence[int], *, wide: bool = False) -> int:
    num_rows, width = shape
    return num_rows * width + width // TILE * _factor_type(wide).itemsize * _padded(num_rows)


def _factor_type(wide: bool) -> torch.dtype:
    return torch.float32 if wide else torch.bfloat16


def _padded(num_rows: int) -> int:
    """Rows, padded: each tile's factors start where the copy engine can read."""
    return -(-num_rows // 8) * 8


def has_blocks(matrix: Fp8Matrix) -> bool:
    """Whether factors are those of blocks of ``TILE`` x ``TILE`` weights, as most checkpoints have them.

    Products rely on a little less, which ``reorder`` keeps where it interleaves gate and up: within TILE rows from a
    multiple of TILE, rows 0 to 7 of every 16 have one factor, and the others one.
    """
    num_rows = matrix.words.shape[0]
    whole = num_rows // TILE * TILE
    if num_rows % 16:
        return False
    blocks = matrix.factors[:, :whole].unflatten(1, (-1, TILE))
    rest = matrix.factors[:, whole:]
    return bool((blocks == blocks[..., :1]).all()) and bool((rest == rest[:, :1]).all())


def quantize(
    parts: Iterable[Tensor], shape: Sequence[int], device: torch.device, layout: int = MOVED, block_rows: int = 1
) -> Fp8Matrix:
    """One matrix of all parts, stacked along the output: each is [rows, columns] of any float type.

    ``block_rows``: rows of a part that share their scales.
    """
    matrix = empty(shape, device, layout=layout)
    for rows, weights in slabs(parts, shape[0], device, block_rows):
        put_rounded(matrix, rows, weights, block_rows)
    return matrix


def put_rounded(matrix: Fp8Matrix, rows: slice, weights: Tensor, block_rows: int = 1) -> None:
    """``weights``: float32 [rows, columns]"""
    groups = weights.view(weights.shape[0], -1, TILE)
    largest = groups.abs().amax(dim=2)
    if block_rows > 1:
        largest = torch.cat([each.amax(0, keepdim=True).expand_as(each) for each in largest.split(block_rows)])
    scale = (largest / MAX_VALUE).bfloat16().float()
    steps = groups / torch.where(scale > 0, scale, 1.0)[..., None]
    codes = steps.clamp_(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn).view(torch.uint8)
    put(matrix, rows, codes.view(weights.shape), scale)


def empty(
    shape: Sequence[int],
    device: torch.device,
    kept: Tensor | None = None,
    layout: int = MOVED,
    *,
    wide: bool = False,  # factors in float32
) -> Fp8Matrix:
    num_rows, width = shape
    assert width % TILE == 0
    words = torch.empty(num_rows, width // 2, dtype=torch.int16, device=device)
    factors = torch.empty(width // TILE, _padded(num_rows), dtype=_factor_type(wide), device=device)[:, :num_rows]
    return Fp8Matrix(words, factors, kept, layout)


def put(matrix: Fp8Matrix, rows: slice, codes: Tensor, scale: Tensor) -> None:
    """``codes``: uint8 [rows, columns]; ``scale``: float32 [rows, tiles], below 2^31"""
    low, high = codes.to(torch.int16).view(codes.shape[0], -1, 2, TILE // 2).unbind(2)
    if matrix.fp8_layout == BYTES:
        bits = low | high << 8
    else:
        bits = (low & 0x80) << 8 | (low & 0x7F) << 4 | (high & 0x70) << 8 | (high & 0x80) << 4 | (high & 0x0F)
    matrix.words[rows] = bits.flatten(1)
    matrix.factors[:, rows] = (scale * 2.0**FACTOR_BITS).T.to(matrix.factors.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _weights_kernel(
    words, factors, ids, out, num_rows, width, tile_stride, N: tl.constexpr, K: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    launch_dependents_and_wait()
    out_row, inside, row = rows_to_unpack(ids, num_rows, N)
    tile = tl.program_id(1)
    word = tile * (K // 2) + tl.arange(0, K // 2)
    found = tl.load(words + row[:, None] * (width // 2) + word[None, :], mask=inside[:, None], other=0)
    factor = tl.load(factors + tile.to(tl.int64) * tile_stride + row, mask=inside, other=0.0)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    low, high = coded_weights(found, factor, dtype, LAYOUT)
    target = out + out_row[:, None].to(tl.int64) * width + tile * K + tl.arange(0, K // 2)[None, :]
    tl.store(target, plain(low.to(tl.float32), dtype).to(dtype), mask=inside[:, None])
    tl.store(target + K // 2, plain(high.to(tl.float32), dtype).to(dtype), mask=inside[:, None])
