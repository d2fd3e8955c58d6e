"""Qwen3.5 MoE: the dense family's mixers, a routed MLP with a gated shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.load.spec import ModelSpec, MoeSpec
from slipstream.runners.torch.caches import GdnLayerCache, LayerKv
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, load_mlp
from slipstream.runners.torch.models.qwen3_5 import hybrid_layer
from slipstream.runners.torch.ops import Linear, RmsNorm, Rotary, wide
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class SparseMlp:
    router: Linear  # rows: experts, then the shared expert's gate
    experts: Sequence[DenseMlp]
    shared: DenseMlp
    num_active: int

    def __call__(self, x: Tensor, norm: RmsNorm) -> Tensor:
        add, x = x, norm(x)
        scores, shared_gate = self.router(x).split([len(self.experts), 1], dim=-1)
        share, expert = wide(scores).softmax(-1).topk(self.num_active, dim=-1)  # [tokens, active]
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        y = add + torch.sigmoid(shared_gate) * self.shared.alone(x)
        return y + self._routed(x, share, expert)

    def _routed(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        """Expert by expert, so that each one's matrices are read once; summed in the order of the routing."""
        pairs = x.new_empty(*expert.shape, x.shape[1])  # [tokens, active, hidden]
        for e in expert.unique().tolist():
            token, place = (expert == e).nonzero(as_tuple=True)
            pairs[token, place] = self.experts[e].alone(x[token])
        return (pairs * share[..., None]).sum(1)


def load_moe(weights: Weights, name: str, spec: ModelSpec) -> SparseMlp:
    moe = spec.moe
    assert moe is not None
    router = weights.linear([f"{name}.gate", f"{name}.shared_expert_gate"], [moe.num_experts, 1], spec.hidden_size)
    shared = load_mlp(weights, f"{name}.shared_expert", spec.hidden_size, moe.shared_size)
    load = _load_fused if f"{name}.experts.gate_up_proj" in weights.checkpoint else _load_apart
    return SparseMlp(router, load(weights, f"{name}.experts", spec, moe), shared, moe.num_active)


def _load_fused(weights: Weights, name: str, spec: ModelSpec, moe: MoeSpec) -> list[DenseMlp]:
    gate_up = weights.stack(f"{name}.gate_up_proj", (moe.num_experts, 2 * moe.expert_size, spec.hidden_size))
    down = weights.stack(f"{name}.down_proj", (moe.num_experts, spec.hidden_size, moe.expert_size))
    return [DenseMlp(up, out, weights.ops) for up, out in zip(gate_up, down, strict=True)]


def _load_apart(weights: Weights, name: str, spec: ModelSpec, moe: MoeSpec) -> list[DenseMlp]:
    return [load_mlp(weights, f"{name}.{e}", spec.hidden_size, moe.expert_size) for e in range(moe.num_experts)]


def load_layer(
    weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, cache: LayerKv | GdnLayerCache
) -> DecoderLayer:
    return hybrid_layer(weights, name, spec, rotary, cache, load_moe(weights, f"{name}.mlp", spec))
