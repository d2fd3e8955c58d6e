"""Qwen3.5 MoE: the dense family's mixers, a routed MLP with a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.caches import LayerCache
from slipstream.runners.torch.experts import Addends, Experts
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, load_mlp
from slipstream.runners.torch.models.qwen3_5 import hybrid_layer
from slipstream.runners.torch.ops import Linear, RmsNorm, Rotary
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class SparseMlp:
    router: Linear  # rows: experts, then the shared expert's gate
    experts: Experts
    shared: DenseMlp
    num_experts: int
    num_active: int

    def __call__(self, x: Tensor, norm: RmsNorm, batch: Batch) -> Tensor:
        y = norm(x)
        scores, shared_gate = self.router(y).split([self.num_experts, 1], dim=-1)
        return self.experts(y, scores, self.num_active, Addends(x, self.shared.alone(y), shared_gate), batch)


def load_moe(weights: Weights, name: str, spec: ModelSpec) -> SparseMlp:
    moe = spec.moe
    assert moe is not None
    names = [f"{name}.gate", f"{name}.shared_expert_gate"]
    router = weights.linear(names, [moe.num_experts, 1], spec.hidden_size, role="replicated")
    shared = load_mlp(weights, f"{name}.shared_expert", spec.hidden_size, moe.shared_size)
    experts = weights.experts(f"{name}.experts", moe.num_experts, moe.expert_size, spec.hidden_size)
    return SparseMlp(router, experts, shared, moe.num_experts, moe.num_active)


def load_layer(weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, cache: LayerCache) -> DecoderLayer:
    return hybrid_layer(weights, name, spec, rotary, cache, load_moe(weights, f"{name}.mlp", spec))
