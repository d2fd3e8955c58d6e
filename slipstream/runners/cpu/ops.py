"""The runner's operations on the C kernels: float32 activations. The kernels are in bindings.py and the C files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.fused_layers import stack
from slipstream.runners.cpu.gdn import GdnLayer, fits
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.caches import GdnLayerCache, LayerKv
from slipstream.runners.torch.models.layers import DecoderLayer, Layers
from slipstream.runners.torch.ops import GdnWeights, HeadShape, Rotary, concat_norm, gated_delta_net


class CpuOps:
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def stack(self, layers: Sequence[DecoderLayer]) -> Layers:
        return stack(self._kernels, layers)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self._kernels.rms_norm(flat, weight, eps, torch.empty_like(flat)).view(x.shape)

    def concat_norm(self, a: Tensor, weight_a: Tensor, b: Tensor, weight_b: Tensor, eps: float) -> Tensor:
        return concat_norm(self, a, weight_a, b, weight_b, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_mul(gate_up, torch.empty(gate_up.shape[0], gate_up.shape[1] // 2))

    def rope_store(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rotary: Rotary,
        kv: LayerKv,
        batch: RaggedBatch,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        q = torch.empty(qkv.shape[0], heads.num_q * heads.dim)
        where = (batch.positions, batch.rope_positions, batch.token_slots, batch.block_table)
        return self._kernels.rope_store(qkv, q, kv.k, kv.v, *where, rotary.cos, rotary.sin, *(norms or ()))

    def attend(
        self, q: Tensor, heads: HeadShape, kv: LayerKv, batch: RaggedBatch, gate: Tensor | None = None
    ) -> Tensor:
        where = (batch.positions, batch.token_slots, batch.block_table)
        y = self._kernels.attend(q, kv.k, kv.v, *where, heads.dim**-0.5, torch.empty_like(q))
        return y if gate is None else self._kernels.sigmoid_mul(gate, y)

    def gdn(self, mixed: Tensor, weights: GdnWeights, cache: GdnLayerCache, batch: RaggedBatch) -> Tensor:
        if not fits(weights.spec):
            return gated_delta_net(self, mixed, weights, cache, batch)
        return GdnLayer(weights, cache).run(self._kernels, mixed, batch.rows)

    def argmax(self, logits: Tensor) -> Tensor:
        return self._kernels.argmax(logits)

    def gumbel_argmax(self, logits: Tensor, inv_temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return self._kernels.gumbel_argmax(logits, inv_temperature, seeds, positions.contiguous())

    def log_softmax(self, logits: Tensor) -> Tensor:
        return self._kernels.log_softmax(logits)

    def confidence(self, logits: Tensor) -> Tensor:
        conf = torch.empty(logits.shape[0])
        self._kernels.argmax(logits, conf)
        return conf
