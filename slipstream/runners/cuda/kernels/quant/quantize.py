"""The interface of quantized matrices, and the parts that all formats share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

SLAB = 1 << 23  # weights quantized at once
UNIT_BITS = 24
# Kernels that scale weights compute with weights over this: without it the stored scales, which also undo how codes are
# read as bfloat16, would be too large for bfloat16.
UNIT = tl.constexpr(2.0**UNIT_BITS)


class QuantizedMatrix(Protocol):
    """[rows, columns]; its codes lie in words of 16 bits, those of every ``tile`` columns together."""

    @property
    def words(self) -> Tensor: ...  # int16 [rows, words], contiguous

    @property
    def width(self) -> int: ...  # columns

    @property
    def tile(self) -> int: ...  # columns

    @property
    def kind(self) -> str: ...  # int8, int4, fp8

    @property
    def fp8_layout(self) -> int: ...  # see fp8.py; 0: not in FP8

    @property
    def bits(self) -> int: ...  # of a code

    @property
    def kept(self) -> Tensor | None: ...  # the last rows, if they are not quantized: [rows, columns]

    @property
    def at_once(self) -> int: ...  # columns of activations multiplied in one product

    @property
    def num_rows(self) -> int: ...

    @property
    def num_tiles(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def kernel_scales(self, num_rows: int) -> Any:
        """Scales (and zero points) as the product kernel takes them, with ``num_rows`` rows a program."""
        ...

    def first(self, num_rows: int) -> Self:
        """A view."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """In place. ``rows``: the new order, a permutation."""
        ...

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """All rows, or the rows ``ids``, dequantized, into ``out`` if given. [rows, columns]"""
        ...


@triton.jit
def plain(values, dtype: tl.constexpr):
    """Undo UNIT in float32 results of weights over UNIT.

    float16 would lose such weights: there they are not divided by UNIT.
    """
    return values if dtype == tl.float16 else values * UNIT


@triton.jit
def rows_to_unpack(ids, num_rows, N: tl.constexpr):
    """Of the first program axis: N rows of the result, a mask of those inside it, and the matrix's rows they hold."""
    out_row = tl.program_id(0) * N + tl.arange(0, N)
    inside = out_row < num_rows
    row = out_row.to(tl.int64)
    if ids is not None:
        row = tl.load(ids + out_row, mask=inside, other=0).to(tl.int64)
    return out_row, inside, row


@triton.jit
def concatenated(a, b, c, d):
    """Side by side. [N, W] each -> [N, 4 W]"""
    N: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    four = tl.join(tl.join(a, c), tl.join(b, d)).reshape([N, W, 4])
    return four.permute(0, 2, 1).reshape([N, 4 * W])


def slabs(
    parts: Iterable[Tensor], num_rows: int, device: torch.device, multiple: int = 1
) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their weights in float32 on the device, a few at a time: temporary memory stays small.

    ``parts``: [rows, columns] of any float type, stacked along the output; consumed one by one. All but a part's last
    slab are of a multiple of so many rows.
    """
    start = 0
    for part in parts:
        for slab in part.split(max(1, SLAB // part.shape[1] // multiple) * multiple):
            yield slice(start, start + slab.shape[0]), slab.to(device).float()
            start += slab.shape[0]
    assert start == num_rows
