"""Quantized matrices on a GPU, quantized at load or in FP8 as stored: our kernels, or unpacked for the library's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import UnknownModel
from slipstream.load.tensor import FP8_TYPES, FP8_WIDE, RawTensor
from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import (
    MAX_TOKENS,
    Scratch,
    TileConfig,
    Unscaled,
    fitted,
    interleaved_rows,
)
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    SCRATCH_FLOATS,
    SPLIT_K_COUNTERS,
    VAST,
    quantized_gated,
    quantized_linear,
    quantized_normed,
    tile_config,
    tokens_of_a_block,
)
from slipstream.runners.cuda.kernels.moe.experts_quantized import quantized_expert_pairs
from slipstream.runners.cuda.kernels.quant import fp8, int4, int8
from slipstream.runners.cuda.kernels.quant.code_layout import CodeLayout, in_pairs, layout_of
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix
from slipstream.runners.cuda.kernels.quant.pack import fp8_factors
from slipstream.runners.cuda.kernels.quant.quantize import SLAB, QuantizedMatrix
from slipstream.runners.cuda.model.coded import CodedExperts, CodedLinear, CodedStack, CodedStacks, packed_matrix
from slipstream.runners.cuda.model.linear import CudaExperts, CudaFormat, ExpertStack, PackedLinear, library_product
from slipstream.runners.cuda.model.mixed_experts import ExpertMatrices, MixedExperts
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.ops import Linear, LinearStack, Ops, RmsNorm
from slipstream.runners.torch.weights import LinearFormat, Parts, as_tensor

UNQUANTIZED = ("gate", "shared_expert_gate")  # routers: quantized, they would choose other experts
VOCABULARY = ("embed_tokens", "lm_head")
WEIGHT_BYTES = {8: 1.0, 4: 0.5 + 4 / int4.GROUP}  # in a tile, by bits: with its scales


@dataclass(frozen=True, slots=True)
class CudaQuantizedLinear(PackedLinear[QuantizedMatrix]):
    def __call__(self, x: Tensor | Unscaled, add: Tensor | None = None) -> Tensor:
        config = self._tile_config(x.shape[0])
        if config is not None:
            return quantized_linear(x, self.matrix, config, self.scratch, self.bias, add)
        assert isinstance(x, Tensor)
        return library_product(x, self._unpacked(), self.bias, add)

    @property
    def max_fused_tokens(self) -> int:
        """None with 4 bits: measured, fused operations take registers that unpacking needs (log 119)."""
        fuses = self.bias is None and self.dtype == torch.bfloat16 and self.matrix.bits == 8
        return MAX_TOKENS if fuses and self._tile_config(MAX_TOKENS) is not None else 0

    def normed(self, x: Tensor, add: Tensor, norm: RmsNorm) -> tuple[Tensor, Unscaled]:
        config = self._tile_config(x.shape[0])
        assert config is not None
        return quantized_normed(x, self.matrix, config, self.scratch, add, norm.weight, norm.eps)

    def interleave_gate_up(self) -> None:
        self.matrix.reorder(interleaved_rows(self.num_out, self.matrix.words.device))

    def gated(self, x: Tensor | Unscaled) -> Tensor:
        config = self._tile_config(x.shape[0])
        assert config is not None
        return quantized_gated(x, self.matrix, config, self.scratch)

    def _tile_config(self, num_tokens: int) -> TileConfig | None:
        return fitted_config(self.matrix, num_tokens, self.dtype)


def fitted_config(matrix: QuantizedMatrix, num_tokens: int, dtype: torch.dtype) -> TileConfig | None:
    """None: the matrix is unpacked for the library."""
    config, block = tile_config(matrix, num_tokens), tokens_of_a_block(matrix.bits, num_tokens)
    device, weight_bytes = gpu(matrix.words.device), WEIGHT_BYTES[matrix.bits]
    return config and fitted(config, block, dtype.itemsize, device, weight_bytes=weight_bytes)


@dataclass(frozen=True, slots=True)
class QuantizedExperts(ExpertStack[QuantizedMatrix]):
    """The matrices of all experts, stacked along the output."""

    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        return quantized_expert_pairs(x, self.gate_up, self.down, expert, positions)


class Quantizer(Protocol):
    """A module of kernels/quant: one way to quantize matrices."""

    def quantize(self, parts: Iterable[Tensor], shape: Sequence[int], device: torch.device, /) -> QuantizedMatrix: ...

    def stored_bytes(self, shape: Sequence[int], /) -> int: ...


class CudaStoredFormat(CudaFormat):
    """Quantized matrices as the checkpoint stores them; the others in the activations' own type.

    ``unpacks``: whether the memory plan of a large step counts a matrix unpacked for the library. So it does once a
    type in codes was planned for.
    """

    _fp8_layout = fp8.MOVED

    def __init__(self, ops: Ops, unpacks: bool = True) -> None:
        super().__init__(ops)
        self._unpacks = unpacks

    @cached_property
    def _dense(self) -> CudaFormat:
        return CudaFormat(self.ops)

    @cached_property
    def _quantized_scratch(self) -> Scratch:
        return Scratch(self.ops.device, SCRATCH_FLOATS, SPLIT_K_COUNTERS)

    def _layout(self, dtype: str) -> CodeLayout | None:
        """Of a type that stays in its codes."""
        return layout_of(dtype)

    def _part_layout(self, part: RawTensor) -> CodeLayout | None:
        layout = self._layout(part.dtype)
        if layout is None or not layout.float_factors:
            return layout
        assert part.scale is not None
        scales = torch.from_numpy(np.array(part.scale)).to(self.ops.device)
        return in_pairs(layout) if fp8_factors(scales) is None else layout

    def linear(self, parts: Sequence[RawTensor], bias: Tensor | None) -> Linear:
        made: list[Linear] = []
        start = 0
        for layout, same in self._runs(parts):
            shape = _stacked_shape(same)
            own = None if bias is None else bias[start : start + shape[0]]
            if layout is None:
                made.append(self._without_codes(same, own))
            else:
                slabs = (slab for part in same for slab in _slabs(part))
                matrix = packed_matrix(layout, slabs, shape, self.ops.device)
                coded = CodedLinear(matrix, own, self._quantized_scratch, self.ops.dtype)
                coded.reserve()
                made.append(coded)
            start += shape[0]
        if len(made) == 1:
            return made[0]
        return (CodedStack if any(isinstance(part, CodedLinear) for part in made) else LinearStack)(tuple(made))

    def _runs(self, parts: Parts) -> list[tuple[CodeLayout | None, list[RawTensor]]]:
        """Neighbours that become one matrix: of one layout in codes, or rows in FP8 with others after them."""
        runs: list[tuple[CodeLayout | None, list[RawTensor]]] = []
        for part in parts:
            layout = self._part_layout(part)
            if runs and runs[-1][0] == layout and (self._kept_type(runs[-1][1][-1]) or not self._kept_type(part)):
                runs[-1][1].append(part)
            else:
                runs.append((layout, [part]))
        return runs

    def _without_codes(self, parts: Parts, bias: Tensor | None) -> Linear:
        matrix = self._quantized_matrix(parts)
        return super().linear(parts, bias) if matrix is None else self._with_room(matrix, bias)

    def _with_room(self, matrix: QuantizedMatrix, bias: Tensor | None) -> CudaQuantizedLinear:
        made = self._make_linear(matrix, bias)
        made.reserve()
        return made

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        return self._joined(self._expert_matrices(gate_up), self._expert_matrices(down))

    def _expert_matrices(self, matrices: Sequence[Parts]) -> ExpertMatrices:
        """In the form of the first expert's: in codes, in FP8, or in the activations' own type."""
        first = matrices[0]
        if all(self._layout(part.dtype) is not None for part in first):
            return self._coded_stacks(matrices)
        made = self._quantized_matrix(
            [part for parts in matrices for part in self._alike(parts, [first[0]] * len(parts))]
        )
        return self._stacked(matrices) if made is None else made

    def _joined(self, gate_up: ExpertMatrices, down: ExpertMatrices) -> Experts:
        if isinstance(gate_up, CodedStacks) and isinstance(down, CodedStacks):
            return CodedExperts(gate_up, down)
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return CudaExperts(gate_up, down)
        if isinstance(gate_up, CodedStacks | Tensor) or isinstance(down, CodedStacks | Tensor):
            return MixedExperts(gate_up, down)
        return self._make_experts(gate_up, down)

    def _coded_stacks(self, matrices: Sequence[Parts]) -> CodedStacks:
        """Parts of one layout in one stack, as they follow each other in an expert: the first one's decides."""
        layouts = [layout for part in matrices[0] if (layout := self._part_layout(part)) is not None]
        whole = len(set(layouts)) == 1
        each = [slice(None)] if whole else [slice(at, at + 1) for at in range(len(layouts))]
        return CodedStacks(tuple(self._coded_stack(layouts[which][0], matrices, which) for which in each))

    def _coded_stack(self, layout: CodeLayout, matrices: Sequence[Parts], which: slice) -> CodedMatrix:
        first = matrices[0]
        num_rows, width = _stacked_shape(first[which])
        slabs = (slab for parts in matrices for part in self._alike(parts, first)[which] for slab in _slabs(part))
        return packed_matrix(layout, slabs, (len(matrices) * num_rows, width), self.ops.device)

    def _alike(self, parts: Parts, others: Parts) -> Parts:
        """An expert's, which must stay in the types that those stay in."""
        for part, other in zip(parts, others, strict=True):
            if self._kept_type(part) != self._kept_type(other):
                raise UnknownModel(
                    f"{part.name} is stored as {part.dtype}, but {other.name} as {other.dtype}, and experts of one "
                    "layer must be of one type: take --dtype bfloat16 or int8, or a model whose experts are alike."
                )
        return parts

    def _kept_type(self, part: RawTensor) -> str:
        """That of a matrix which stays as it is stored; "": it does not."""
        return part.dtype if self._layout(part.dtype) is not None or _stays_coded(part) else ""

    def _quantized_matrix(self, parts: Parts) -> QuantizedMatrix | None:
        """All parts, stacked along the output; None: in the activations' own type."""
        num_coded = sum(part.dtype in FP8_TYPES for part in parts)
        if not num_coded or not all(_stays_coded(part) for part in parts[:num_coded]):
            return None
        return self._as_stored(parts[:num_coded], parts[num_coded:])

    def _as_stored(self, coded: Parts, others: Parts) -> QuantizedMatrix:
        """``others``: rows after the coded ones that the checkpoint keeps in more bits."""
        kept = self.matrix(others) if others else None
        return self._in_fp8(coded, kept)

    def _in_fp8(self, parts: Parts, kept: Tensor | None = None) -> fp8.Fp8Matrix:
        wide = any(part.dtype == FP8_WIDE for part in parts)
        matrix = fp8.empty(_stacked_shape(parts), self.ops.device, kept, self._fp8_layout, wide=wide)
        start = 0
        for slab in (slab for part in parts for slab in _slabs(part)):
            rows = slice(start, start + slab.shape[0])
            self._put_fp8(matrix, rows, slab)
            start = rows.stop
        return matrix

    def _put_fp8(self, matrix: fp8.Fp8Matrix, rows: slice, slab: RawTensor) -> None:
        assert slab.scale is not None
        codes, scale = (torch.from_numpy(np.array(each)).to(self.ops.device) for each in (slab.data, slab.scale))
        fp8.put(matrix, rows, codes, scale)

    def _make_linear(self, matrix: QuantizedMatrix, bias: Tensor | None) -> CudaQuantizedLinear:
        return CudaQuantizedLinear(matrix, bias, self._quantized_scratch, self.ops.dtype)

    def _make_experts(self, gate_up: QuantizedMatrix, down: QuantizedMatrix) -> Experts:
        return QuantizedExperts(gate_up, down)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        layout = self._layout(dtype)
        if layout is not None:
            self._unpacks = True
            return layout.stored_bytes(_flattened_shape(shape))
        if dtype in FP8_TYPES and shape[-1] % fp8.TILE == 0:
            return fp8.stored_bytes(_flattened_shape(shape), wide=dtype == FP8_WIDE)
        return super().stored_bytes(dtype, shape)

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) * self.ops.dtype.itemsize if self._unpacks and shape[0] < VAST else 0


class CudaQuantizedFormat(CudaStoredFormat):
    """Quantized matrices, except routers; quantized on the device, one after the other."""

    def __init__(self, ops: Ops, quantizer: Quantizer) -> None:
        super().__init__(ops)
        self._quantizer = quantizer

    def of(self, name: str) -> LinearFormat:
        return self._dense if _last(name) in UNQUANTIZED else self

    def _layout(self, dtype: str) -> CodeLayout | None:
        return None

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        if not self._fits(matrix.shape[1]):
            return super().dense(matrix, bias)
        return self._with_room(self._quantize([matrix], matrix.shape), bias)

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        return self._joined(self._rounded(gate_up), self._rounded(down))

    def _rounded(self, stack: Tensor) -> ExpertMatrices:
        if not self._fits(stack.shape[2]):
            return stack.to(self.ops.dtype)
        return self._quantize([stack.flatten(0, 1)], _flattened_shape(stack.shape))

    def _kept_type(self, part: RawTensor) -> str:
        return ""

    def _quantized_matrix(self, parts: Parts) -> QuantizedMatrix | None:
        if not self._fits(parts[0].shape[1]):
            return None
        slabs = (as_tensor(slab, self.ops.device) for part in parts for slab in _slabs(part))
        return self._quantize(slabs, _stacked_shape(parts))

    def _quantize(self, parts: Iterable[Tensor], shape: Sequence[int]) -> QuantizedMatrix:
        return self._quantizer.quantize(parts, shape, self.ops.device)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if len(shape) < 2 or not self._fits(shape[-1]):
            return CudaFormat.stored_bytes(self, dtype, shape)
        return self._quantizer.stored_bytes(_flattened_shape(shape))

    def _fits(self, width: int) -> bool:
        """Whether rows of activations start where the copy engine can read."""
        return width * self.ops.dtype.itemsize % 16 == 0


class CudaInt4Format(CudaQuantizedFormat):
    """4 bits, but 8 for embedding and output: no later layer makes up for their errors."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops, int4)

    @cached_property
    def _vocabulary(self) -> CudaQuantizedFormat:
        return CudaQuantizedFormat(self.ops, int8)

    def of(self, name: str) -> LinearFormat:
        return self._vocabulary if _last(name) in VOCABULARY else super().of(name)


class CudaFp8Format(CudaQuantizedFormat):
    """As checkpoints in FP8 are: embedding and output in the activations' own type."""

    _block_rows = 1  # that share their scales, where a matrix is rounded

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops, fp8)

    def of(self, name: str) -> LinearFormat:
        return self._dense if _last(name) in VOCABULARY else super().of(name)

    def _quantized_matrix(self, parts: Parts) -> QuantizedMatrix | None:
        if not self._fits(parts[0].shape[1]):
            return None
        return self._in_fp8(parts)

    def _put_fp8(self, matrix: fp8.Fp8Matrix, rows: slice, slab: RawTensor) -> None:
        """What is stored in FP8 is not rounded again."""
        if slab.dtype in FP8_TYPES:
            super()._put_fp8(matrix, rows, slab)
        else:
            weights = as_tensor(slab, self.ops.device).to(self.ops.device).float()
            fp8.put_rounded(matrix, rows, weights, self._block_rows)

    def _quantize(self, parts: Iterable[Tensor], shape: Sequence[int]) -> QuantizedMatrix:
        return fp8.quantize(parts, shape, self.ops.device, self._fp8_layout, self._block_rows)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if dtype in FP8_TYPES:
            return CudaStoredFormat.stored_bytes(self, dtype, shape)
        return super().stored_bytes(dtype, shape)

    def _fits(self, width: int) -> bool:
        return width % fp8.TILE == 0


def _stays_coded(part: RawTensor) -> bool:
    return part.dtype in FP8_TYPES and part.shape[1] % fp8.TILE == 0


def _stacked_shape(parts: Parts) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def _flattened_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Of a stack of matrices, as one matrix."""
    return math.prod(shape[:-1]), shape[-1]


def _slabs(part: RawTensor) -> Iterator[RawTensor]:
    step = max(1, SLAB // part.shape[1] // fp8.TILE) * fp8.TILE  # whole blocks, where these share their scales
    return (part.rows(slice(at, at + step)) for at in range(0, part.shape[0], step))


def _last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def quantized_format(ops: Ops, dtype: str) -> CudaQuantizedFormat:
    if dtype == "int8":
        return CudaQuantizedFormat(ops, int8)
    return CudaInt4Format(ops) if dtype == "int4" else CudaFp8Format(ops)
