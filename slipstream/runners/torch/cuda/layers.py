"""Dense layers in fewer launches: norms and activations are done by the products around them (kernels/linear.py).

For steps of few tokens; larger ones, and layers that have other parts, run as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.cuda.kernels.elementwise import silu_mul
from slipstream.runners.torch.cuda.kernels.linear import (
    FEW_TOKENS,
    MAX_TOKENS,
    STRIPE_ROWS,
    Unscaled,
    skinny_gated,
    striped,
)
from slipstream.runners.torch.cuda.linear import CudaLinear
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, InTurn, Layers
from slipstream.runners.torch.ops import Linear, RmsNorm


def stack(layers: Sequence[DecoderLayer]) -> Layers:
    """Takes the layers over: what they multiply with may lie in another order afterwards."""
    if not all(_can_join(layer) for layer in layers):
        return InTurn(layers)
    most = MAX_TOKENS if all(linear.some for layer in layers for linear in _matrices(layer)) else FEW_TOKENS
    return Joined([replace(layer, mlp=_striped_mlp(layer)) for layer in layers], most)


@dataclass(frozen=True, slots=True)
class StripedMlp:
    gate_up: CudaLinear  # rows of gate and of up in stripes
    down: CudaLinear

    def __call__(self, x: Tensor, norm: RmsNorm, batch: Batch) -> Tensor:
        return self.down(self.activated(norm(x)), x)

    def activated(self, x: Tensor | Unscaled) -> Tensor:
        """silu(gate x) * up x"""
        cut = self.gate_up.cut(x.shape[0])
        if cut is not None:
            return skinny_gated(x, self.gate_up.weight, cut, self.gate_up.scratch)
        return silu_mul(self.gate_up(x), STRIPE_ROWS)


@dataclass(frozen=True, slots=True)
class Joined(InTurn):
    most_tokens: int  # that all products take

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        if x.shape[0] > self.most_tokens:
            return InTurn.__call__(self, x, batch)
        y: Tensor | Unscaled = self.layers[0].input_norm(x)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            entry, out, mlp = _cuda(layer.mixer.entry), _cuda(layer.mixer.out), layer.mlp
            assert isinstance(mlp, StripedMlp)
            x, y = out.normed(layer.mixer.mix(entry(y), batch), x, layer.post_norm)
            inner = mlp.activated(y)
            if following is None:
                return mlp.down(inner, x)
            x, y = mlp.down.normed(inner, x, following.input_norm)
        return x


def _can_join(layer: DecoderLayer) -> bool:
    if not isinstance(layer.mlp, DenseMlp):
        return False
    matrices = (layer.mixer.entry, layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)
    return layer.mlp.gate_up.num_out % (2 * STRIPE_ROWS) == 0 and all(
        isinstance(each, CudaLinear) and each.few is not None and each.weight.dtype == torch.bfloat16
        for each in matrices
    )


def _matrices(layer: DecoderLayer) -> list[CudaLinear]:
    assert isinstance(layer.mlp, DenseMlp)
    return [_cuda(each) for each in (layer.mixer.entry, layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)]


def _cuda(linear: Linear) -> CudaLinear:
    assert isinstance(linear, CudaLinear)
    return linear


def _striped_mlp(layer: DecoderLayer) -> StripedMlp:
    *_, gate_up, down = _matrices(layer)
    gate_up.weight.copy_(striped(gate_up.weight))  # in place: of all layers together there is no room for a copy
    return StripedMlp(gate_up, down)
