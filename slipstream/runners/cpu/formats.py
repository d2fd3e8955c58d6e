"""Matrices on the C kernels: which packed format a stored type becomes, and products with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.load.tensor import RawTensor
from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.packed import BF16, F32, W4, W4M, W8, PackedWeight
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.ops import Linear
from slipstream.runners.torch.weights import LinearFormat, Parts, as_tensor

_AS_STORED = {"Q4_0": W4, "Q4_1": W4M, "Q8_0": W8, "BF16": BF16, "F16": F32, "F32": F32}
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
        if num_rows == self.weight.rows or self.weight.cols % 32:
            return PackedLinear(self.kernels, self.weight.slice_rows(num_rows))
        step = max(1, SLAB // self.weight.cols)
        slabs = (torch.arange(at, min(at + step, num_rows)) for at in range(0, num_rows, step))
        quantized = (self.kernels.quantize_w4(self.rows(slab)) for slab in slabs)
        return PackedLinear(self.kernels, self.kernels.gather(num_rows, quantized))


class PackedFormat:
    """``dtype`` auto keeps the file's type where the kernels know it, 8-bit blocks where they do not.

    FP8 is such a case: in 8-bit blocks its products are off by 0.55 to 0.71 % (in BF16: 0.16 %) where FP8 itself
    was off by 2.6 %, in half the bytes and half the time of BF16, which is there on request (decision 14).
    """

    def __init__(self, kernels: Kernels, dtype: str) -> None:
        self.kernels = kernels
        self._dtype = dtype

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
        return math.prod(count) * self.kernels.packed_bytes(self._format(dtype, cols), rows, cols)

    def draft_bytes(self, num_rows: int, shape: tuple[int, int]) -> int:
        return 0 if num_rows == shape[0] or shape[1] % 32 else self.kernels.packed_bytes(W4M, num_rows, shape[1])

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        return 0

    def _format(self, dtype: str, num_cols: int) -> int:
        chosen = _AS_STORED.get(dtype, W8) if self._dtype == "auto" else _BY_DTYPE[self._dtype]
        return BF16 if chosen in (W8, W4M) and num_cols % 32 else chosen

    def _packed(self, parts: Sequence[RawTensor]) -> PackedWeight:
        return self.kernels.concat([self._pack(part) for part in parts])

    def _pack_dense(self, matrix: Tensor) -> PackedWeight:
        return self._pack_matrix(matrix, self._format(_NAMES[matrix.dtype], matrix.shape[1]))

    def _pack(self, raw: RawTensor) -> PackedWeight:
        """A large matrix slab by slab: temporary memory between the file and the kernels' layout stays small."""
        slabs = _slabs(raw)
        if len(slabs) == 1:
            return self._pack_slab(raw)
        return self.kernels.gather(raw.shape[0], (self._pack_slab(slab) for slab in slabs))

    def _pack_slab(self, raw: RawTensor) -> PackedWeight:
        form = self._format(raw.dtype, raw.shape[1])
        if _AS_STORED.get(raw.dtype) == form and form in (W4, W4M, W8):
            return self.kernels.pack_blocks(form, torch.from_numpy(raw.data.copy()), raw.shape[1])
        return self._pack_matrix(as_tensor(raw), form)

    def _pack_matrix(self, matrix: Tensor, form: int) -> PackedWeight:
        if form == W8:
            return self.kernels.quantize_w8(matrix)
        if form == W4M:
            return self.kernels.quantize_w4(matrix)
        return self.kernels.pack_float(matrix.to(torch.bfloat16 if form == BF16 else torch.float32))


def _slabs(raw: RawTensor) -> list[RawTensor]:
    rows, cols = raw.shape
    step = max(1, SLAB // cols)
    return [raw.rows(slice(at, at + step)) for at in range(0, rows, step)]
