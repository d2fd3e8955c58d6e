"""Matrices on a GPU: our kernels while reading the weights is the bottleneck, the library's product beyond.

Stored in the activations' own type; quantized.py has those in fewer bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
import triton
from torch import Tensor

from slipstream.runners.cuda.kernels.gather import gather_rows
from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import (
    FEW_TOKENS,
    MAX_TOKENS,
    Scratch,
    TileConfig,
    Unscaled,
    fitted,
    interleaved_rows,
    skinny_gated,
    skinny_linear,
    skinny_normed,
    tile_config,
)
from slipstream.runners.cuda.kernels.matmul.linear_quantized import VAST
from slipstream.runners.cuda.kernels.moe.experts import combine, expert_pairs, route
from slipstream.runners.torch.experts import Addends, Experts
from slipstream.runners.torch.ops import DenseLinear, Linear, RmsNorm
from slipstream.runners.torch.weights import DenseFormat, Parts

Stack = TypeVar("Stack")
Matrix = TypeVar("Matrix", bound="PackedMatrix")
GLUON_VERSIONS = ((3, 6), (3, 9))  # of Triton, first and last that linear_prefetch.py was compiled with


@dataclass(frozen=True, slots=True)
class CudaLinear(DenseLinear):
    """Its weight is contiguous."""

    scratch: Scratch = field(kw_only=True)
    few: TileConfig | None = field(kw_only=True)  # for up to FEW_TOKENS; None: the library
    some: TileConfig | None = field(kw_only=True)  # for up to MAX_TOKENS; None: the library

    def __call__(self, x: Tensor | Unscaled, add: Tensor | None = None) -> Tensor:
        config = self.tile_config(x.shape[0])
        if config is not None:
            return skinny_linear(x, self.weight, config, self.scratch, add)
        assert isinstance(x, Tensor)
        return library_product(x, self.weight, self.bias, add)

    @property
    def max_fused_tokens(self) -> int:
        if self.few is None or self.weight.dtype != torch.bfloat16:  # float16: a sum times a norm's weight is too large
            return 0
        return MAX_TOKENS if self.some is not None else FEW_TOKENS

    def normed(self, x: Tensor, add: Tensor, norm: RmsNorm) -> tuple[Tensor, Unscaled]:
        config = self.tile_config(x.shape[0])
        assert config is not None
        return skinny_normed(x, self.weight, config, self.scratch, add, norm.weight, norm.eps)

    def interleave_gate_up(self) -> None:
        # In place: of all layers together there is no room for a copy.
        self.weight.copy_(self.weight[interleaved_rows(self.num_out, self.weight.device)])

    def gated(self, x: Tensor | Unscaled) -> Tensor:
        config = self.tile_config(x.shape[0])
        assert config is not None
        return skinny_gated(x, self.weight, config, self.scratch)

    def tile_config(self, num_tokens: int) -> TileConfig | None:
        """None: the library."""
        return self.few if num_tokens <= FEW_TOKENS else self.some if num_tokens <= MAX_TOKENS else None

    def rows(self, ids: Tensor) -> Tensor:
        return gather_rows(self.weight, ids)

    def for_drafts(self, num_rows: int) -> CudaLinear:
        assert self.bias is None
        return make_linear(self.weight[:num_rows], None, self.scratch)


class PackedMatrix(Protocol):
    """Of a format of kernels/quant."""

    @property
    def num_rows(self) -> int: ...

    @property
    def width(self) -> int: ...  # columns

    @property
    def num_bytes(self) -> int: ...

    def first(self, num_rows: int) -> Self: ...

    def weights(self, dtype: torch.dtype, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedLinear(Generic[Matrix]):
    """A matrix in fewer bits than the activations have."""

    matrix: Matrix
    bias: Tensor | None  # [out]
    scratch: Scratch
    dtype: torch.dtype  # of activations

    @property
    def num_out(self) -> int:
        return self.matrix.num_rows

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.weights(self.dtype, ids)

    def for_drafts(self, num_rows: int) -> Self:
        assert self.bias is None
        made = replace(self, matrix=self.matrix.first(num_rows))
        made.reserve()
        return made

    def reserve(self) -> None:
        """At load: the room that large steps unpack it to. It is not to move once steps are captured."""
        if self.num_out < VAST:
            self._room()

    def _unpacked(self) -> Tensor:
        return self.matrix.weights(self.dtype, out=self._room())

    def _room(self) -> Tensor:
        return self.scratch.unpacked(self.num_out, self.matrix.width, self.dtype)


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    if add is None or bias is not None:
        y = torch.nn.functional.linear(x, weight, bias)
        return y if add is None else y + add
    return add.addmm_(x, weight.t())  # in place: otherwise a copy of ``add`` comes first


def make_linear(weight: Tensor, bias: Tensor | None, scratch: Scratch) -> CudaLinear:
    few, some = (fitted_config(weight, bias, num_tokens) for num_tokens in (FEW_TOKENS, MAX_TOKENS))
    return CudaLinear(weight, bias, scratch=scratch, few=few, some=some)


def fitted_config(weight: Tensor, bias: Tensor | None, num_tokens: int) -> TileConfig | None:
    if bias is not None or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    num_out, width = weight.shape
    config = tile_config(num_out, width, num_tokens)
    if config is not None and config.prefetch:
        config = replace(config, prefetch=weight.dtype == torch.bfloat16 and _has_gluon(weight.device))
    return config and fitted(config, num_tokens, weight.itemsize, gpu(weight.device))


@cache
def _has_gluon(device: torch.device) -> bool:
    """Whether the products with prefetch run here. Gluon is experimental: each version of Triton may move it."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = GLUON_VERSIONS[0] <= version <= GLUON_VERSIONS[1]
    return known and gpu(device).has_pdl and gpu(device).has_wgmma


@dataclass(frozen=True, slots=True)
class ExpertStack(Generic[Stack]):
    """All experts of a layer in two stacks; pairs of token and expert are grouped on the device."""

    gate_up: Stack
    down: Stack

    def __call__(self, x: Tensor, scores: Tensor, num_active: int, addends: Addends, batch: Any) -> Tensor:
        expert, share = route(scores, num_active)
        pairs = self.pairs(x, expert, batch.positions)
        return combine(pairs, share, batch.positions, addends.shared, addends.shared_gate, addends.residual)

    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        """Each active expert's MLP of its token. [tokens, active, hidden]"""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CudaExperts(ExpertStack[Tensor]):
    """[experts, 2 * inner, hidden] and [experts, hidden, inner]"""

    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        return expert_pairs(x, self.gate_up, self.down, expert, positions)


class CudaFormat(DenseFormat):
    """Every matrix in the activations' own type, as our kernels read it."""

    @cached_property
    def _scratch(self) -> Scratch:
        """Made with the first matrix: a memory plan needs the format, but no device."""
        return Scratch(self.ops.device)

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        return make_linear(matrix.to(self.ops.dtype), bias, self._scratch)

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        return CudaExperts(gate_up.to(self.ops.dtype), down.to(self.ops.dtype))

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        return CudaExperts(self._stacked(gate_up), self._stacked(down))

    def _stacked(self, matrices: Sequence[Parts]) -> Tensor:
        first = self.matrix(matrices[0])
        whole = torch.empty(len(matrices), *first.shape, device=first.device, dtype=first.dtype)
        for target, parts in zip(whole, matrices, strict=True):
            target.copy_(self.matrix(parts))
        return whole
