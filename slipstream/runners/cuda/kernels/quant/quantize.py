"""What matrices in few bits have in common, however many: rounded slab by slab, multiplied and unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

SLAB = 1 << 23  # weights rounded at once
UNIT_BITS = 24
# Kernels that scale weights compute with weights over this: without it, what scales are stored times, to undo how
# levels and codes are read as bfloat16, would be too large for bfloat16.
UNIT = tl.constexpr(2.0**UNIT_BITS)


class RoundedMatrix(Protocol):
    """[rows, columns]; its levels lie in words of 16 bits, those of every ``tile`` columns together."""

    @property
    def words(self) -> Tensor: ...  # int16 [rows, words], contiguous

    @property
    def width(self) -> int: ...  # columns

    @property
    def tile(self) -> int: ...  # columns

    @property
    def kind(self) -> str: ...  # int8, int4, fp8

    @property
    def bits(self) -> int: ...  # of a level

    @property
    def kept(self) -> Tensor | None: ...  # the last rows, if they are not in levels: [rows, columns]

    @property
    def at_once(self) -> int: ...  # columns of activations that meet weights in one product

    @property
    def num_rows(self) -> int: ...

    @property
    def num_tiles(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def facts(self, num_rows: int) -> Any:
        """What makes levels into weights, as the kernel of products takes it with so many rows a program."""
        ...

    def first(self, num_rows: int) -> Self:
        """A view."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """In place. ``rows``: those that come to lie in this order, all of them."""
        ...

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """All rows, or those that ``ids`` name, as plain weights. [rows, columns]"""
        ...


@triton.jit
def plain(values, dtype: tl.constexpr):
    """What was computed, in float32, from weights over UNIT in that type: as if from the weights themselves.

    float16 would lose them: there, weights are as they are.
    """
    return values if dtype == tl.float16 else values * UNIT


@triton.jit
def rows_to_unpack(ids, num_rows, N: tl.constexpr):
    """Of the first program axis: N places in the result, which of them count, and the matrix's rows that go there."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    inside = place < num_rows
    row = place.to(tl.int64)
    if ids is not None:
        row = tl.load(ids + place, mask=inside, other=0).to(tl.int64)
    return place, inside, row


def slabs(parts: Iterable[Tensor], num_rows: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their weights in float32 on the device, a few at a time: what stands between stays small.

    ``parts``: [rows, columns] of any float type, stacked along the output; taken in turn.
    """
    start = 0
    for part in parts:
        for slab in part.split(max(1, SLAB // part.shape[1])):
            yield slice(start, start + slab.shape[0]), slab.to(device).float()
            start += slab.shape[0]
    assert start == num_rows
