"""Matrices in FP8 whose products may round their activations to FP8, too (``--fp8-activations on``).

A product takes the activations as they are, or rounds them and goes to the FP8 tensor cores: by its shape and by the
number of tokens, as measured at the start (fp8_choice.py). Both read the same codes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import TileConfig, Unscaled, fitted
from slipstream.runners.cuda.kernels.matmul.linear_fp8 import (
    fp8_gated,
    fp8_linear,
    fp8_normed,
    fp8_tile_config,
    tokens_of_a_block,
)
from slipstream.runners.cuda.kernels.moe.experts_fp8 import fp8_expert_pairs
from slipstream.runners.cuda.kernels.moe.experts_quantized import quantized_expert_pairs
from slipstream.runners.cuda.kernels.quant.fp8 import BYTES, TILE, Fp8Matrix, has_blocks
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix
from slipstream.runners.cuda.model.linear import ExpertStack
from slipstream.runners.cuda.model.quantized import CudaFp8Format, CudaQuantizedLinear, CudaStoredFormat
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.ops import RmsNorm

SIZES = (16, 32, 64, 128, 256, 512, 2048)  # tokens: a product of any number is as one of the next size, or of the last
UNMEASURED = 64  # tokens: where nothing was measured, products of more round their activations


class Fp8Choice:
    """Whether products round their activations: one answer for each shape and size, as long as the runner lives.

    Set before the first step: a captured step keeps the product that it was captured with.
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[Hashable, int], bool] = {}

    def rounds(self, shape: Hashable, num_tokens: int) -> bool:
        size = size_of(num_tokens)
        return self._rounds.get((shape, size), size > UNMEASURED)

    def set(self, shape: Hashable, num_tokens: int, rounds: bool) -> None:
        self._rounds[shape, size_of(num_tokens)] = rounds


def size_of(num_tokens: int) -> int:
    return next((size for size in SIZES if num_tokens <= size), SIZES[-1])


def fitted_config(matrix: Fp8Matrix, num_tokens: int) -> TileConfig:
    block, device = tokens_of_a_block(matrix, num_tokens), gpu(matrix.words.device)
    config = fitted(fp8_tile_config(matrix, num_tokens), block, 1, device, weight_bytes=1)
    assert config is not None, "two stages of the largest tiles take 64 KiB: every GPU with FP8 products has more"
    return config


@dataclass(frozen=True, slots=True)
class Fp8Linear(CudaQuantizedLinear):
    matrix: Fp8Matrix
    choice: Fp8Choice = field(kw_only=True)

    @property
    def shape(self) -> Hashable:
        """Products of linears with the same shape cost the same."""
        return self.matrix.num_rows, self.matrix.words.shape[0], self.matrix.width

    def __call__(self, x: Tensor | Unscaled, add: Tensor | None = None) -> Tensor:
        return self.multiply(x, add, rounds=self.choice.rounds(self.shape, x.shape[0]))

    def multiply(self, x: Tensor | Unscaled, add: Tensor | None, rounds: bool) -> Tensor:
        if not rounds:
            return CudaQuantizedLinear.__call__(self, x, add)
        return fp8_linear(x, self.matrix, self._fp8_config(x), self.scratch, self.bias, add)

    def normed(self, x: Tensor, add: Tensor, norm: RmsNorm) -> tuple[Tensor, Unscaled]:
        if not self.choice.rounds(self.shape, x.shape[0]):
            return CudaQuantizedLinear.normed(self, x, add, norm)
        return fp8_normed(x, self.matrix, self._fp8_config(x), self.scratch, add, norm.weight, norm.eps)

    def gated(self, x: Tensor | Unscaled) -> Tensor:
        if not self.choice.rounds(self.shape, x.shape[0]):
            return CudaQuantizedLinear.gated(self, x)
        return fp8_gated(x, self.matrix, self._fp8_config(x), self.scratch)

    def _fp8_config(self, x: Tensor | Unscaled) -> TileConfig:
        return fitted_config(self.matrix, x.shape[0])


@dataclass(frozen=True, slots=True)
class Fp8Experts(ExpertStack[Fp8Matrix]):
    choice: Fp8Choice = field(kw_only=True)

    @property
    def shape(self) -> Hashable:
        return "experts", self.gate_up.num_rows, self.gate_up.width, self.down.num_rows, self.down.width

    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        return self.multiply(x, expert, positions, rounds=self.choice.rounds(self.shape, x.shape[0]))

    def multiply(self, x: Tensor, expert: Tensor, positions: Tensor, rounds: bool) -> Tensor:
        if rounds:
            return fp8_expert_pairs(x, self.gate_up, self.down, expert, positions)
        return quantized_expert_pairs(x, self.gate_up, self.down, expert, positions)


class Fp8StoredFormat(CudaStoredFormat):
    """As ``CudaStoredFormat``, with products that may round activations."""

    _fp8_layout = BYTES

    @cached_property
    def choice(self) -> Fp8Choice:
        return Fp8Choice()

    def _make_linear(self, matrix: QuantizedMatrix, bias: Tensor | None) -> Fp8Linear:
        assert isinstance(matrix, Fp8Matrix)
        matrix = replace(matrix, in_blocks=has_blocks(matrix))
        return Fp8Linear(matrix, bias, self._quantized_scratch, self.ops.dtype, choice=self.choice)

    def _make_experts(self, gate_up: QuantizedMatrix, down: QuantizedMatrix) -> Experts:
        assert isinstance(gate_up, Fp8Matrix)
        assert isinstance(down, Fp8Matrix)
        return Fp8Experts(gate_up, down, choice=self.choice)


class Fp8QuantizingFormat(CudaFp8Format, Fp8StoredFormat):
    """As ``CudaFp8Format``, which quantizes at load, with products that may round activations."""

    _block_rows = TILE
