"""Matrices on a GPU in few bits, rounded at load or in FP8 as stored: our kernels, or unpacked for the library's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.load.tensor import FP8, RawTensor
from slipstream.runners.cuda.kernels.matmul.linear import MAX_TOKENS, Scratch, Tiling, Unscaled, fitted, stripes
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    MEETINGS,
    SCRATCH,
    rounded_gated,
    rounded_linear,
    rounded_normed,
    tiling,
    tokens_of_a_block,
)
from slipstream.runners.cuda.kernels.moe.experts_quantized import rounded_expert_pairs
from slipstream.runners.cuda.kernels.quant import fp8, int4, int8
from slipstream.runners.cuda.kernels.quant.quantize import SLAB, RoundedMatrix
from slipstream.runners.cuda.linear import CudaFormat, ExpertStack, library_product, shared_bytes
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.ops import Linear, Ops, RmsNorm
from slipstream.runners.torch.weights import LinearFormat, Parts, as_tensor

KEPT = ("gate", "shared_expert_gate")  # routers: rounded, they would choose other experts
VOCABULARY = ("embed_tokens", "lm_head")
WEIGHT_BYTES = {8: 1.0, 4: 0.5 + 4 / int4.GROUP}  # in a tile, by bits: with facts that come with it


@dataclass(frozen=True, slots=True)
class CudaRoundedLinear:
    matrix: RoundedMatrix
    bias: Tensor | None  # [out]
    scratch: Scratch
    dtype: torch.dtype  # of activations

    @property
    def num_out(self) -> int:
        return self.matrix.num_rows

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def __call__(self, x: Tensor | Unscaled, add: Tensor | None = None) -> Tensor:
        cut = self._cut(x.shape[0])
        if cut is not None:
            return rounded_linear(x, self.matrix, cut, self.scratch, self.bias, add)
        assert isinstance(x, Tensor)
        return library_product(x, self.matrix.weights(self.dtype), self.bias, add)

    @property
    def most_joined(self) -> int:
        """4 bits are not: measured, what surrounds a product costs registers that unpacking needs."""
        joins = self.bias is None and self.dtype == torch.bfloat16 and self.matrix.bits == 8
        return MAX_TOKENS if joins and self._cut(MAX_TOKENS) is not None else 0

    def normed(self, x: Tensor, add: Tensor, norm: RmsNorm) -> tuple[Tensor, Unscaled]:
        cut = self._cut(x.shape[0])
        assert cut is not None
        return rounded_normed(x, self.matrix, cut, self.scratch, add, norm.weight, norm.eps)

    def stripe(self) -> None:
        self.matrix.reorder(stripes(self.num_out, self.matrix.words.device))

    def gated(self, x: Tensor | Unscaled) -> Tensor:
        cut = self._cut(x.shape[0])
        assert cut is not None
        return rounded_gated(x, self.matrix, cut, self.scratch)

    def _cut(self, num_tokens: int) -> Tiling | None:
        """None: unpacked for the library."""
        matrix = self.matrix
        cut = tiling(matrix, num_tokens)
        shared, block = shared_bytes(matrix.words.device), tokens_of_a_block(matrix.bits, num_tokens)
        return cut and fitted(cut, block, self.dtype.itemsize, shared, weight_bytes=WEIGHT_BYTES[matrix.bits])

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.weights(self.dtype, ids)

    def for_drafts(self, num_rows: int) -> CudaRoundedLinear:
        assert self.bias is None
        return replace(self, matrix=self.matrix.first(num_rows))


@dataclass(frozen=True, slots=True)
class RoundedExperts(ExpertStack[RoundedMatrix]):
    """The matrices of all experts below each other."""

    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        return rounded_expert_pairs(x, self.gate_up, self.down, expert, positions)


class Rounding(Protocol):
    """A module of kernels: how matrices are rounded."""

    def rounded(self, parts: Iterable[Tensor], shape: Sequence[int], device: torch.device, /) -> RoundedMatrix: ...

    def stored_bytes(self, shape: Sequence[int], /) -> int: ...


class CudaStoredFormat(CudaFormat):
    """What a checkpoint holds in FP8 stays so; all else in the activations' own type.

    ``unpacks``: whether the plan of a large step counts a matrix unpacked for the library.
    """

    def __init__(self, ops: Ops, unpacks: bool = True) -> None:
        super().__init__(ops)
        self._unpacks = unpacks

    @cached_property
    def _kept(self) -> CudaFormat:
        return CudaFormat(self.ops)

    @cached_property
    def _rounded_scratch(self) -> Scratch:
        return Scratch(self.ops.device, SCRATCH, MEETINGS)

    def linear(self, parts: Sequence[RawTensor], bias: Tensor | None) -> Linear:
        matrix = self._in_few_bits(parts)
        return super().linear(parts, bias) if matrix is None else self._multiplied(matrix, bias)

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        stacks = [self._in_few_bits([part for parts in each for part in parts]) for each in (gate_up, down)]
        if any(stack is None or stack.kept is not None for stack in stacks):
            return super().experts(gate_up, down)
        return RoundedExperts(*(stack for stack in stacks if stack is not None))

    def _in_few_bits(self, parts: Parts) -> RoundedMatrix | None:
        """All parts, stacked along the output; None: in the activations' own type."""
        num_coded = sum(part.dtype == FP8 for part in parts)
        if not num_coded or not all(_stays_coded(part) for part in parts[:num_coded]):
            return None
        return self._as_stored(parts[:num_coded], parts[num_coded:])

    def _as_stored(self, coded: Parts, others: Parts) -> RoundedMatrix:
        """``others``: rows behind those in codes that the checkpoint keeps in more bits."""
        matrix = fp8.empty(_stacked_shape(coded), self.ops.device, self.matrix(others) if others else None)
        start = 0
        for slab in (slab for part in coded for slab in _slabs(part)):
            assert slab.scale is not None
            codes, scale = (torch.from_numpy(np.array(each)).to(self.ops.device) for each in (slab.data, slab.scale))
            fp8.put(matrix, slice(start, start + slab.shape[0]), codes, scale)
            start += slab.shape[0]
        return matrix

    def _multiplied(self, matrix: RoundedMatrix, bias: Tensor | None) -> Linear:
        return CudaRoundedLinear(matrix, bias, self._rounded_scratch, self.ops.dtype)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if dtype == FP8 and shape[-1] % fp8.TILE == 0:
            return fp8.stored_bytes(_below_each_other(shape))
        return super().stored_bytes(dtype, shape)

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) * self.ops.dtype.itemsize if self._unpacks else 0


class CudaRoundedFormat(CudaStoredFormat):
    """Matrices in few bits, but for routers; rounded on the device, one after the other."""

    def __init__(self, ops: Ops, rounding: Rounding) -> None:
        super().__init__(ops)
        self._rounding = rounding

    def of(self, name: str) -> LinearFormat:
        return self._kept if _last(name) in KEPT else self

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        if not self._fits(matrix.shape[1]):
            return super().dense(matrix, bias)
        return self._multiplied(self._rounded([matrix], matrix.shape), bias)

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        if not self._fits(gate_up.shape[2]) or not self._fits(down.shape[2]):
            return super().dense_experts(gate_up, down)
        stacks = (self._rounded([stack.flatten(0, 1)], _below_each_other(stack.shape)) for stack in (gate_up, down))
        return RoundedExperts(*stacks)

    def _in_few_bits(self, parts: Parts) -> RoundedMatrix | None:
        if not self._fits(parts[0].shape[1]):
            return None
        slabs = (as_tensor(slab, self.ops.device) for part in parts for slab in _slabs(part))
        return self._rounded(slabs, _stacked_shape(parts))

    def _rounded(self, parts: Iterable[Tensor], shape: Sequence[int]) -> RoundedMatrix:
        return self._rounding.rounded(parts, shape, self.ops.device)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if len(shape) < 2 or not self._fits(shape[-1]):
            return CudaFormat.stored_bytes(self, dtype, shape)
        return self._rounding.stored_bytes(_below_each_other(shape))

    def _fits(self, width: int) -> bool:
        """Rows of activations must start where the copy engine can."""
        return width * self.ops.dtype.itemsize % 16 == 0


class CudaInt4Format(CudaRoundedFormat):
    """4 bits, but 8 for embedding and output: what they get wrong no later layer makes up for."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops, int4)

    @cached_property
    def _vocabulary(self) -> CudaRoundedFormat:
        return CudaRoundedFormat(self.ops, int8)

    def of(self, name: str) -> LinearFormat:
        return self._vocabulary if _last(name) in VOCABULARY else super().of(name)


class CudaFp8Format(CudaRoundedFormat):
    """As checkpoints in FP8 are: embedding and output in the activations' own type."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops, fp8)

    def of(self, name: str) -> LinearFormat:
        return self._kept if _last(name) in VOCABULARY else super().of(name)

    def _in_few_bits(self, parts: Parts) -> RoundedMatrix | None:
        if all(_stays_coded(part) for part in parts):
            return self._as_stored(parts, ())
        return super()._in_few_bits(parts)

    def _fits(self, width: int) -> bool:
        return width % fp8.TILE == 0


def _stays_coded(part: RawTensor) -> bool:
    return part.dtype == FP8 and part.shape[1] % fp8.TILE == 0


def _stacked_shape(parts: Parts) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def _below_each_other(shape: Sequence[int]) -> tuple[int, int]:
    """Of matrices in a stack."""
    return math.prod(shape[:-1]), shape[-1]


def _slabs(part: RawTensor) -> Iterator[RawTensor]:
    step = max(1, SLAB // part.shape[1])
    return (part.rows(slice(at, at + step)) for at in range(0, part.shape[0], step))


def _last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def rounded_format(ops: Ops, dtype: str) -> CudaRoundedFormat:
    if dtype == "int8":
        return CudaRoundedFormat(ops, int8)
    return CudaInt4Format(ops) if dtype == "int4" else CudaFp8Format(ops)
