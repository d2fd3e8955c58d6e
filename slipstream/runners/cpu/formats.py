"""Matrices on the C kernels: which packed format a stored type becomes, and products with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.load.quantized.types import codes_of, container_of
from slipstream.load.tensor import RawTensor
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.packed import (
    BF16,
    BLOCK_TYPES,
    CODE_BITS,
    F32,
    HALF_PRECISION,
    TABLE4,
    W4M,
    W8,
    Layout,
    PackedWeight,
    layout_of,
    stacked_weight,
)
from slipstream.runners.cpu.quantize import q4_1_blocks, q8_0_blocks
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.ops import Linear
from slipstream.runners.torch.weights import LinearFormat, Parts, as_tensor

_FLOATS = {"BF16": BF16, "F16": F32, "F32": F32}
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SLAB = 1 << 20  # elements converted at once
_BY_DTYPE = {"float32": F32, "bfloat16": BF16, "int8": W8, "int4": W4M}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    kernels: Kernels
    weight: PackedWeight
    bias: Tensor | None = None  # [out]

    @property
    def num_out(self) -> int:
        return self.weight.rows

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.kernels.linear(x, self.weight, torch.empty(x.shape[0], self.num_out), self.bias, add)

    def rows(self, ids: Tensor) -> Tensor:
        return self.kernels.embed(ids, self.weight)

    def for_drafts(self, num_rows: int) -> PackedLinear:
        """In 4 bits where rows are left out anyway: a draft pass reads little else than this matrix."""
        assert self.bias is None
        whole = self.weight
        if num_rows == whole.rows or whole.cols % 32 or whole.layout.kind <= TABLE4:
            return PackedLinear(self.kernels, whole.slice_rows(num_rows))
        made = self.kernels.empty(W4M, num_rows, whole.cols)
        step = max(1, SLAB // whole.cols)
        for at in range(0, num_rows, step):
            rows = self.rows(torch.arange(at, min(at + step, num_rows)))
            self.kernels.fill_blocks(made, at, "Q4_1", q4_1_blocks(rows).numpy())
        return PackedLinear(self.kernels, made)


class PackedFormat:
    """``dtype`` auto keeps the file's type where the kernels know it, 8-bit blocks where they do not.

    All codes and scales are kept as they are: nothing is rounded again. FP8 becomes 8-bit blocks: there its products
    are off by 0.55 to 0.71 % (in BF16: 0.16 %) where FP8 itself was off by 2.6 %, in half the bytes and half the time
    of BF16, which is there on request (decision 14). ``floats``: how auto keeps what the file holds as floats.
    """

    def __init__(self, kernels: Kernels, dtype: str, floats: str = "auto") -> None:
        self.kernels = kernels
        self._dtype = dtype
        self._floats = floats

    def of(self, name: str) -> LinearFormat:
        return self

    def linear(self, parts: Sequence[RawTensor], bias: Tensor | None) -> Linear:
        return PackedLinear(self.kernels, self._packed(parts), bias)

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        return PackedExperts(self.kernels, *([self._packed(parts) for parts in each] for each in (gate_up, down)))

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        return PackedExperts(self.kernels, *([self._pack_dense(matrix) for matrix in each] for each in (gate_up, down)))

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        return PackedLinear(self.kernels, self._pack_dense(matrix), bias)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if len(shape) < 2 or shape[-2] == 1:  # a vector, or a conv's kernels
            return math.prod(shape) * 4
        *count, rows, cols = shape
        return math.prod(count) * self.kernels.packed_bytes(self.layout(dtype, cols), rows, cols)

    def draft_bytes(self, num_rows: int, shape: tuple[int, int]) -> int:
        return 0 if num_rows == shape[0] or shape[1] % 32 else self.kernels.packed_bytes(W4M, num_rows, shape[1])

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        return 0

    def layout(self, dtype: str, num_cols: int) -> Layout:
        """Of a matrix that a file holds in that type."""
        if self._dtype == "auto" and container_of(dtype) is not None:
            return _as_stored(dtype, num_cols) or F32
        wanted = self._floats if self._dtype == "auto" else self._dtype
        chosen = _FLOATS.get(dtype, W8) if wanted == "auto" else _BY_DTYPE[wanted]
        return BF16 if chosen in (W8, W4M) and num_cols % 32 else chosen

    def _packed(self, parts: Sequence[RawTensor]) -> PackedWeight:
        """Neighbours of one layout and order of columns are one matrix, others are stacked."""
        groups: list[list[RawTensor]] = []
        for part in parts:
            if groups and self._fit(groups[-1][0], part):
                groups[-1].append(part)
            else:
                groups.append([part])
        return stacked_weight([self._pack(group) for group in groups])

    def _fit(self, one: RawTensor, other: RawTensor) -> bool:
        return self._layout_of(one) == self._layout_of(other) and _equal(self._order(one), self._order(other))

    def _pack_dense(self, matrix: Tensor) -> PackedWeight:
        made = self.kernels.empty(self.layout(_NAMES[matrix.dtype], matrix.shape[1]), *matrix.shape)
        self._fill_floats(made, 0, matrix)
        return made

    def _pack(self, parts: Sequence[RawTensor]) -> PackedWeight:
        """Slab by slab: temporary memory between the file and the kernels' layout stays small."""
        first, num_rows, row = parts[0], sum(part.shape[0] for part in parts), 0
        made = self.kernels.empty(self._layout_of(first), num_rows, first.shape[1], self._order(first))
        for part in parts:
            direct = self._keeps(part) and part.dtype in BLOCK_TYPES
            for slab in [part] if direct else _slabs(part):
                self._fill(made, row, slab)
                row += slab.shape[0]
        return made

    def _layout_of(self, raw: RawTensor) -> Layout:
        return self.layout(raw.dtype, raw.shape[1])

    def _keeps(self, raw: RawTensor) -> bool:
        """Whether codes and scales stay what they are."""
        return self._layout_of(raw) == _as_stored(raw.dtype, raw.shape[1])

    def _order(self, raw: RawTensor) -> Tensor | None:
        """int32 [columns]; None: columns lie as they are."""
        return torch.from_numpy(raw.order.astype(np.int32)) if raw.order is not None and self._keeps(raw) else None

    def _fill(self, made: PackedWeight, row: int, raw: RawTensor) -> None:
        if not self._keeps(raw):
            self._fill_floats(made, row, _floats(raw))
        elif raw.dtype in BLOCK_TYPES:
            self.kernels.fill_blocks(made, row, raw.dtype, np.ascontiguousarray(raw.data))
        else:
            self.kernels.fill_codes(made, row, codes_of(raw))

    def _fill_floats(self, made: PackedWeight, row: int, matrix: Tensor) -> None:
        if made.layout == W8:
            self.kernels.fill_blocks(made, row, "Q8_0", q8_0_blocks(matrix).numpy())
        elif made.layout == W4M:
            self.kernels.fill_blocks(made, row, "Q4_1", q4_1_blocks(matrix).numpy())
        else:
            self.kernels.fill_floats(made, row, matrix.to(torch.bfloat16 if made.layout == BF16 else torch.float32))


def _as_stored(dtype: str, num_cols: int) -> Layout | None:
    """The layout of a type's own codes; None: it has none, or the kernels' blocks do not fit."""
    container = container_of(dtype)
    if container is None or num_cols % 32:
        return None
    return layout_of(container, bits=CODE_BITS.get(dtype, 8), half_precision=dtype in HALF_PRECISION)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _floats(raw: RawTensor) -> Tensor:
    """The matrix itself, its columns in order."""
    if container_of(raw.dtype) is None:
        return as_tensor(raw)
    stored = torch.from_numpy(codes_of(raw).weights())
    if raw.order is None:
        return stored
    matrix = torch.empty_like(stored)
    matrix[:, torch.from_numpy(raw.order).long()] = stored
    return matrix


def _slabs(raw: RawTensor) -> list[RawTensor]:
    rows, cols = raw.shape
    step = max(1, SLAB // cols)
    return [raw.rows(slice(at, at + step)) for at in range(0, rows, step)]
