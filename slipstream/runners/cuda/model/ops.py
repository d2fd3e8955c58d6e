"""The operations a model is written in, as Triton kernels over a batch that lives on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.attention.attention import attend
from slipstream.runners.cuda.kernels.attention.rope import rope_store
from slipstream.runners.cuda.kernels.elementwise import silu_mul
from slipstream.runners.cuda.kernels.norm import concat_norm, rms_norm
from slipstream.runners.cuda.kernels.recurrent.gdn import gdn_mix
from slipstream.runners.torch.caches import GdnRingLayer, LayerKv
from slipstream.runners.torch.ops import GdnWeights, HeadShape, Rotary, TorchOps


class CudaOps(TorchOps):
    """Sampling is the runner's own here: it needs the rows that live on the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def concat_norm(self, a: Tensor, weight_a: Tensor, b: Tensor, weight_b: Tensor, eps: float) -> Tensor:
        return concat_norm(a, weight_a, b, weight_b, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def rope_store(  # type: ignore[override]
        self,
        qkv: Tensor,
        heads: HeadShape,
        rotary: Rotary,
        kv: LayerKv,
        batch: DeviceBatch,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        return rope_store(qkv, heads, rotary, kv, batch, norms)

    def attend(  # type: ignore[override]
        self, q: Tensor, heads: HeadShape, kv: LayerKv, batch: DeviceBatch, gate: Tensor | None = None
    ) -> Tensor:
        return attend(q, heads, kv, batch, gate)

    def gdn(  # type: ignore[override]
        self, mixed: Tensor, weights: GdnWeights, cache: GdnRingLayer, batch: DeviceBatch
    ) -> Tensor:
        others = (weights.conv, weights.decay_scale, weights.dt_bias, weights.norm, weights.eps, weights.spec)
        return gdn_mix(mixed, *others, cache.state, cache.ring, batch)
