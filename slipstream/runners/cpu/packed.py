"""Weights in the kernels' layout: the layouts, and a packed matrix as Python and the C code see it.

Knows memory layouts by their flags only: weight.h describes them, and bindings.py packs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.load.quantized.codes import Codes, Container

# As in weight.h: kinds of codes, then flags.
CODES4, TABLE4, CODES5, CODES6, CODES8, _BF16, _F32, _STACK = range(8)
HALVES, HAS_FACTOR, HAS_MINIMUM, HAS_MINIMUM_FACTOR, WIDE_STEPS, HALF_STEPS = (1 << bit for bit in range(3, 9))
_SPAN_SHIFT, _OFFSET_SHIFT = 9, 11
_MAX_SPAN = 256
_TABLE_OFFSET = 128
# As in gguf_block.h: types whose blocks the C code reads. Their steps have half precision; so have those of two others.
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
HALF_PRECISION = frozenset((*BLOCK_TYPES, "Q2_K", "Q3_K"))
CODE_BITS = {"Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6}  # where int8 codes have fewer


@dataclass(frozen=True, slots=True)
class Layout:
    """How a matrix is packed."""

    format: int  # kind of codes and flags
    table: tuple[int, ...] = ()  # of TABLE4: 16 whole numbers
    bias: int = 0  # added to a code to make it unsigned
    step_scale: float = 1.0  # times each step: a power of 2 that makes the table whole

    @property
    def kind(self) -> int:
        return self.format & 7

    @property
    def has_codes(self) -> bool:
        return self.kind <= CODES8

    @property
    def half_precision(self) -> bool:
        return self.has_codes and not self.format & WIDE_STEPS


BF16, F32, STACK = (Layout(kind) for kind in (_BF16, _F32, _STACK))


def layout_of(container: Container, *, bits: int = 8, half_precision: bool = False) -> Layout:
    """That of codes. ``bits``: what int8 codes need. ``half_precision``: its steps are exact in float16."""
    table: tuple[int, ...] = ()
    scale, bias = 1.0, 0
    if container.kind == "table4":
        table, scale = _whole_numbers(container.table)
        kind, offset = TABLE4, _TABLE_OFFSET
    elif container.kind == "affine4":
        kind, offset = CODES4, container.offset
    else:
        kind, offset = _int8_codes(container, bits)
        bias = offset
    return Layout(kind | _flags(container, half_precision) | offset << _OFFSET_SHIFT, table, bias, scale)


def _int8_codes(container: Container, bits: int) -> tuple[int, int]:
    """The kind, and the offset of its unsigned codes."""
    if bits == 5 and container.group > 16:
        return CODES5, 0 if container.has_minimum else 16
    if bits == 6 and container.group == 16 and container.has_factor and not container.has_minimum:
        return CODES6, 32
    return CODES8, 128


def _flags(container: Container, half_precision: bool) -> int:
    assert container.span <= _MAX_SPAN, container
    flags = (max(1, container.span // 32).bit_length() - 1) << _SPAN_SHIFT
    flags |= HALVES if container.group == 16 else 0
    flags |= HALF_STEPS if container.span == 16 else 0
    flags |= HAS_FACTOR if container.has_factor else 0
    flags |= HAS_MINIMUM if container.has_minimum else 0
    flags |= HAS_MINIMUM_FACTOR if container.minimum_has_factor else 0
    return flags | (0 if half_precision else WIDE_STEPS)


def _whole_numbers(table: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    """The table times a power of 2, and the inverse of that."""
    for shift in range(8):
        scaled = [value * 2**shift for value in table]
        if all(value == int(value) for value in scaled):
            assert all(-128 <= value < 128 for value in scaled), table
            return tuple(int(value) for value in scaled), 0.5**shift
    raise AssertionError(table)


W4 = layout_of(Container("affine4", 32, 32, offset=8), half_precision=True)  # Q4_0
W4M = layout_of(Container("affine4", 32, 32, has_minimum=True), half_precision=True)  # Q4_1
W8 = layout_of(Container("int8", 32, 32), half_precision=True)  # Q8_0


class CodesRows(ctypes.Structure):
    """As in pack.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "step", "minimum_step", "factor", "minimum_factor")),
        *((name, ctypes.c_int32) for name in ("group", "span", "bias")),
    )


def code_arrays(codes: Codes, layout: Layout) -> tuple[np.ndarray | None, ...]:
    """The arrays of CodesRows, each in one piece."""
    step = codes.step * np.float32(layout.step_scale) if layout.step_scale != 1 else codes.step
    arrays = codes.codes, step, codes.minimum_step, codes.factor, codes.minimum_factor
    if layout.half_precision:
        for each in (step, codes.minimum_step):
            assert each is None or np.array_equal(each.astype(np.float16), each, equal_nan=True)
    return tuple(None if each is None else np.ascontiguousarray(each) for each in arrays)


class _Weight(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("num_parts", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("table", ctypes.c_uint8 * 16),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [rows, cols] in the kernels' layout. A slice shares ``data`` with the whole."""

    layout: Layout
    rows: int
    cols: int
    data: Tensor = field(repr=False)  # uint8 [packed bytes]; of a stack: int64 [addresses of the parts]
    struct: _Weight = field(repr=False)
    address: int = field(repr=False)  # of struct
    parts: tuple[PackedWeight, ...] = field(default=(), repr=False)  # of a stack
    order: Tensor | None = field(default=None, repr=False)  # int32 [cols]: column i is that of x[order[i]]

    def slice_rows(self, num_rows: int) -> PackedWeight:
        """The first ``num_rows`` output rows, nothing copied."""
        assert 0 < num_rows <= self.rows
        assert self.layout != STACK
        return packed_weight(self.layout, num_rows, self.cols, self.data, order=self.order)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) if self.parts else self.data.numel()


def packed_weight(
    layout: Layout,
    rows: int,
    cols: int,
    data: Tensor,
    parts: tuple[PackedWeight, ...] = (),
    order: Tensor | None = None,
) -> PackedWeight:
    assert order is None or (order.dtype == torch.int32 and order.shape == (cols,) and order.is_contiguous())
    order_at = None if order is None else order.data_ptr()
    struct = _Weight(layout.format, rows, cols, len(parts), data.data_ptr(), order_at)
    struct.table[:] = [value + _TABLE_OFFSET for value in layout.table] or [0] * 16
    return PackedWeight(layout, rows, cols, data, struct, ctypes.addressof(struct), parts, order)


def stacked_weight(parts: list[PackedWeight]) -> PackedWeight:
    """Parts of any layouts below each other, as they are: one product for each."""
    assert all(part.cols == parts[0].cols and part.layout != STACK for part in parts)
    if len(parts) == 1:
        return parts[0]
    addresses = torch.tensor([part.address for part in parts], dtype=torch.int64)
    return packed_weight(STACK, sum(part.rows for part in parts), parts[0].cols, addresses, tuple(parts))
