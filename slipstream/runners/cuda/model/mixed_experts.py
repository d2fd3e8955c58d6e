"""Routed experts whose two matrices are not stored alike: each product by the kernels of its own form."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.runners.cuda.kernels.moe.experts import expert_product
from slipstream.runners.cuda.kernels.moe.experts_coded import coded_expert_product
from slipstream.runners.cuda.kernels.moe.experts_quantized import quantized_expert_product
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix
from slipstream.runners.cuda.model.coded import CodedStacks
from slipstream.runners.cuda.model.linear import ExpertStack

# Of all experts: [experts, rows, columns], or [experts * rows, columns] in fewer bits.
ExpertMatrices = Tensor | QuantizedMatrix | CodedStacks


@dataclass(frozen=True, slots=True)
class MixedExperts(ExpertStack[ExpertMatrices]):
    def pairs(self, x: Tensor, expert: Tensor, positions: Tensor) -> Tensor:
        hidden = x.shape[1]
        num_experts = _num_rows(self.down) // hidden
        activated = _product(x, self.gate_up, expert, positions, num_experts, gated=True)
        made = _product(activated, self.down, expert, positions, num_experts, gated=False)
        return made.view(*expert.shape, hidden)


def _num_rows(matrices: ExpertMatrices) -> int:
    if isinstance(matrices, Tensor):
        return matrices.shape[0] * matrices.shape[1]
    stacks = matrices.matrices if isinstance(matrices, CodedStacks) else (matrices,)
    return sum(stack.num_rows for stack in stacks)


def _product(
    source: Tensor, matrices: ExpertMatrices, expert: Tensor, positions: Tensor, num_experts: int, *, gated: bool
) -> Tensor:
    """``gated``: silu(gate) * up of rows of tokens; otherwise of rows of pairs. [pairs, inner or hidden]"""
    if isinstance(matrices, Tensor):
        return expert_product(source, matrices, expert, positions, gated=gated)
    if isinstance(matrices, CodedStacks):
        return coded_expert_product(source, matrices.matrices, expert, positions, num_experts, gated=gated)
    return quantized_expert_product(source, matrices, expert, positions, num_experts, gated=gated)
