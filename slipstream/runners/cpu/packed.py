"""Weights in the kernels' layout: the formats, and a packed matrix as Python and the C code see it.

Knows memory layouts by their names only: weight.h describes them, and bindings.py packs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

W4, W4M, W8, BF16, F32, STACK = range(6)  # as in weight.h
RAW_BLOCK_BYTES = {W4: 18, W4M: 20, W8: 34}  # of a GGUF block of 32


class _Weight(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("num_parts", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [rows, cols] in the kernels' layout. A slice shares ``data`` with the whole."""

    format: int
    rows: int
    cols: int
    data: Tensor = field(repr=False)  # uint8 [packed bytes]; of a stack: int64 [addresses of the parts]
    struct: _Weight = field(repr=False)
    address: int = field(repr=False)  # of struct
    parts: tuple[PackedWeight, ...] = field(default=(), repr=False)  # of a stack

    def slice_rows(self, num_rows: int) -> PackedWeight:
        """The first ``num_rows`` output rows, nothing copied."""
        assert 0 < num_rows <= self.rows
        assert self.format != STACK
        return packed_weight(self.format, num_rows, self.cols, self.data)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) if self.parts else self.data.numel()


def packed_weight(
    format: int, rows: int, cols: int, data: Tensor, parts: tuple[PackedWeight, ...] = ()
) -> PackedWeight:
    struct = _Weight(format, rows, cols, len(parts), data.data_ptr())
    return PackedWeight(format, rows, cols, data, struct, ctypes.addressof(struct), parts)


def stacked_weight(parts: list[PackedWeight]) -> PackedWeight:
    """Parts of any formats below each other, as they are: one product for each."""
    addresses = torch.tensor([part.address for part in parts], dtype=torch.int64)
    return packed_weight(STACK, sum(part.rows for part in parts), parts[0].cols, addresses, tuple(parts))
