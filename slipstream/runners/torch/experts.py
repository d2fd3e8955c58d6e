"""The routed experts of a sparse MLP: the interface, and the reference that runs them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.runners.torch.ops import Linear, Ops, wide


@dataclass(frozen=True, slots=True)
class Addends:
    """Added to the routed experts' sum."""

    residual: Tensor  # [tokens, hidden]
    shared: Tensor  # [tokens, hidden]: the shared expert's output
    shared_gate: Tensor  # [tokens, 1], before the sigmoid


class Experts(Protocol):
    def __call__(self, x: Tensor, scores: Tensor, num_active: int, addends: Addends, batch: Any) -> Tensor:
        """residual + sigmoid(shared_gate) * shared + the best experts of x, by their share of the scores."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertList:
    """Expert by expert, so that each one's matrices are read once; summed in the order of the routing."""

    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    ops: Ops

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.gate_up, *self.down))

    def __call__(self, x: Tensor, scores: Tensor, num_active: int, addends: Addends, batch: Any) -> Tensor:
        share, expert = wide(scores).softmax(-1).topk(num_active, dim=-1)  # [tokens, active]
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        pairs = x.new_empty(*expert.shape, x.shape[1])  # [tokens, active, hidden]
        for e in expert.unique().tolist():
            token, rank = (expert == e).nonzero(as_tuple=True)
            pairs[token, rank] = self.down[e](self.ops.silu_mul(self.gate_up[e](x[token])))
        y = addends.residual + torch.sigmoid(addends.shared_gate) * addends.shared
        return y + (pairs * share[..., None]).sum(1)
