"""Qwen3.5 MoE: the dense family's mixers, a routed MLP with a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.caches import GdnLayerCache
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, load_mlp, load_norm
from slipstream.runners.torch.models.qwen3_5 import load_mixer
from slipstream.runners.torch.ops import LayerKv, Linear, Ops, Rotary, wide
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class SparseMlp:
    router: Linear  # rows: experts, then the shared expert's gate
    gate_up: Tensor  # [experts, 2 * expert size, hidden]
    down: Tensor  # [experts, hidden, expert size]
    shared: DenseMlp
    num_active: int
    ops: Ops

    def __call__(self, x: Tensor, add: Tensor) -> Tensor:
        num_experts = self.gate_up.shape[0]
        scores, shared_gate = self.router(x).split([num_experts, 1], dim=-1)
        share, expert = wide(scores).softmax(-1).topk(self.num_active, dim=-1)  # [tokens, active]
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        y = add + torch.sigmoid(shared_gate) * self.shared(x)
        return y + self._routed(x, share, expert)

    def _routed(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        """Every (token, expert) pair on its own matrices, gathered. [tokens, hidden]"""
        if x.device.type == "cpu":
            return self._by_expert(x, share, expert)
        inner = self.ops.silu_mul(torch.einsum("th,taih->tai", x, self.gate_up[expert]))
        return torch.einsum("tai,tahi,ta->th", inner, self.down[expert], share)

    def _by_expert(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        """Expert by expert: each expert's matrices are read once."""
        pairs = torch.zeros(*expert.shape, x.shape[1], dtype=x.dtype)  # [tokens, active, hidden]
        for e in expert.unique().tolist():
            token, place = (expert == e).nonzero(as_tuple=True)
            inner = self.ops.silu_mul(torch.nn.functional.linear(x[token], self.gate_up[e]))
            pairs[token, place] = torch.nn.functional.linear(inner, self.down[e])
        return (pairs * share[..., None]).sum(1)


def load_moe(weights: Weights, name: str, spec: ModelSpec) -> SparseMlp:
    moe = spec.moe
    assert moe is not None
    router = weights.linear([f"{name}.gate", f"{name}.shared_expert_gate"], [moe.num_experts, 1], spec.hidden_size)
    gate_up, down = _load_experts(weights, f"{name}.experts", spec)
    shared = load_mlp(weights, f"{name}.shared_expert", spec.hidden_size, moe.shared_size)
    return SparseMlp(router, gate_up, down, shared, moe.num_active, weights.ops)


def _load_experts(weights: Weights, name: str, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Fused [experts, ...] tensors, or one set of matrices per expert as older files have them."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    size = moe.expert_size
    if f"{name}.gate_up_proj" in weights.checkpoint:
        return (
            weights.tensor(f"{name}.gate_up_proj", (moe.num_experts, 2 * size, hidden)),
            weights.tensor(f"{name}.down_proj", (moe.num_experts, hidden, size)),
        )
    gate_up = weights.empty(moe.num_experts, 2 * size, hidden)
    down = weights.empty(moe.num_experts, hidden, size)
    for e in range(moe.num_experts):
        gate_up[e, :size] = weights.tensor(f"{name}.{e}.gate_proj.weight", (size, hidden))
        gate_up[e, size:] = weights.tensor(f"{name}.{e}.up_proj.weight", (size, hidden))
        down[e] = weights.tensor(f"{name}.{e}.down_proj.weight", (hidden, size))
    return gate_up, down


def load_layer(
    weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, cache: LayerKv | GdnLayerCache
) -> DecoderLayer:
    return DecoderLayer(
        load_norm(weights, f"{name}.input_layernorm", spec),
        load_mixer(weights, name, spec, rotary, cache),
        load_norm(weights, f"{name}.post_attention_layernorm", spec),
        load_moe(weights, f"{name}.mlp", spec),
    )
