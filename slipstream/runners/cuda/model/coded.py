"""Matrices in the codes of quantised files, as a model uses them: our kernels, or unpacked for the library's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.load.tensor import RawTensor
from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import TileConfig, fitted
from slipstream.runners.cuda.kernels.matmul.linear_coded import coded_linear, tile_config, tokens_of_a_block
from slipstream.runners.cuda.kernels.matmul.linear_whole import MAX_WHOLE_TOKENS, whole_linear
from slipstream.runners.cuda.kernels.moe.experts_coded import coded_expert_pairs
from slipstream.runners.cuda.kernels.quant.code_layout import CodeLayout
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix, empty
from slipstream.runners.cuda.kernels.quant.device_codes import device_codes
from slipstream.runners.cuda.kernels.quant.pack import put
from slipstream.runners.cuda.kernels.quant.whole_numbers import WholeNumbers, whole_numbers
from slipstream.runners.cuda.model.linear import ExpertStack, PackedLinear
from slipstream.runners.torch.ops import Linear, LinearStack


@dataclass(frozen=True, slots=True)
class CodedLinear(PackedLinear[CodedMatrix]):
    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        out = x.new_empty(x.shape[0], self.num_out)
        self.write(x, out, add)
        return out

    def write(self, x: Tensor, out: Tensor, add: Tensor | None = None, numbers: WholeNumbers | None = None) -> None:
        """See WritingLinear. ``numbers``: x as whole numbers, if known"""
        if self.takes_whole_numbers(x):
            whole_linear(numbers or whole_numbers(x), self.matrix, out, add, self.bias)
            return
        config = fitted_config(self.matrix, x.shape[0], self.dtype)
        if config is not None:
            coded_linear(x, self.matrix, config, self.scratch, out, add, self.bias)
            return
        weight = self._unpacked().t()
        if add is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(add, x, weight, out=out)
        if self.bias is not None:
            out += self.bias

    def takes_whole_numbers(self, x: Tensor) -> bool:
        """Their 15 bits are enough for the types of 16."""
        few = x.shape[0] <= MAX_WHOLE_TOKENS and x.dtype.itemsize == 2
        return few and gpu(x.device).has_integer_products


@dataclass(frozen=True, slots=True)
class CodedStack(LinearStack):
    """Of which at least one part is in codes: such parts share their activations as whole numbers."""

    def writer(self, x: Tensor) -> Callable[[Linear, Tensor, Tensor | None], None]:
        write_other = LinearStack.writer(self, x)
        shared = [part for part in self.parts if isinstance(part, CodedLinear) and part.takes_whole_numbers(x)]
        numbers = whole_numbers(x) if shared else None

        def write(part: Linear, out: Tensor, add: Tensor | None) -> None:
            if isinstance(part, CodedLinear):
                part.write(x, out, add, numbers)
            else:
                write_other(part, out, add)

        return write


def fitted_config(matrix: CodedMatrix, num_tokens: int, dtype: torch.dtype) -> TileConfig | None:
    """None: the matrix is unpacked for the library."""
    config, block = tile_config(matrix, num_tokens), tokens_of_a_block(num_tokens)
    device, weight_bytes = gpu(matrix.words.device), matrix.layout.weight_bytes
    return config and fitted(config, block, dtype.itemsize, device, weight_bytes=weight_bytes)


@dataclass(frozen=True, slots=True)
class CodedStacks:
    """The first matrices of all experts: gate and up in one stack, or in one each if their types differ."""

    matrices: tuple[CodedMatrix, ...]


@dataclass(frozen=True, slots=True)
class CodedExperts(ExpertStack[CodedStacks]):
    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        [down] = self.down.matrices
        return coded_expert_pairs(x, self.gate_up.matrices, down, expert, positions)


def packed_matrix(
    layout: CodeLayout, slabs: Iterable[RawTensor], shape: Sequence[int], device: torch.device
) -> CodedMatrix:
    """``slabs``: rows of the matrix, a few at a time, all of types with this layout."""
    matrix = empty(layout, shape, device)
    start = 0
    for slab in slabs:
        end = start + slab.shape[0]
        put(matrix, slice(start, end), device_codes(slab, device))
        start = end
    assert start == matrix.num_rows
    return matrix
