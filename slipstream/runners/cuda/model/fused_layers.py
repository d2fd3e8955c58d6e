"""Dense layers in fewer launches: norms and activations are fused into the products around them (matmul/linear.py).

For steps of few tokens; larger steps, and layers with other parts, run layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from slipstream.runners.cuda.kernels.elementwise import silu_mul
from slipstream.runners.cuda.kernels.matmul.linear import Unscaled
from slipstream.runners.cuda.kernels.matmul.product import INTERLEAVE_ROWS
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, Layers, Sequential
from slipstream.runners.torch.ops import Linear, RmsNorm


@runtime_checkable
class FusedLinear(Protocol):
    """A matrix with norms and activations fused into its product."""

    @property
    def num_out(self) -> int: ...

    @property
    def max_fused_tokens(self) -> int:
        """The largest step with fused operations; 0: none."""
        ...

    def __call__(self, x: Tensor | Unscaled, add: Tensor | None = None) -> Tensor: ...

    def normed(self, x: Tensor, add: Tensor, norm: RmsNorm) -> tuple[Tensor, Unscaled]:
        """x W^T + add, and that normalised."""
        ...

    def interleave_gate_up(self) -> None:
        """Bring the rows of a gate-up matrix, gate first, into the interleaved order that ``gated`` takes."""
        ...

    def gated(self, x: Tensor | Unscaled) -> Tensor:
        """silu(gate x) * up x"""
        ...


def stack(layers: Sequence[DecoderLayer]) -> Layers:
    """Owns the layers from here on: their gate-up matrices may be interleaved in place."""
    max_tokens = min(_max_fused_tokens(layer) for layer in layers)
    if not max_tokens:
        return Sequential(layers)
    return FusedLayers([replace(layer, mlp=_interleaved_mlp(layer)) for layer in layers], max_tokens)


@dataclass(frozen=True, slots=True)
class InterleavedMlp:
    gate_up: FusedLinear  # rows of gate and up interleaved
    down: FusedLinear

    def __call__(self, x: Tensor, norm: RmsNorm, batch: Batch) -> Tensor:
        return self.down(self.activated(norm(x)), x)

    def activated(self, x: Tensor | Unscaled) -> Tensor:
        """silu(gate x) * up x"""
        if x.shape[0] <= self.gate_up.max_fused_tokens:
            return self.gate_up.gated(x)
        return silu_mul(self.gate_up(x), INTERLEAVE_ROWS)


@dataclass(frozen=True, slots=True)
class FusedLayers(Sequential):
    max_tokens: int  # of a step with fused operations

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        if x.shape[0] > self.max_tokens:
            return Sequential.__call__(self, x, batch)
        y: Tensor | Unscaled = self.layers[0].input_norm(x)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            entry, out, mlp = layer.mixer.entry, layer.mixer.out, layer.mlp
            assert isinstance(mlp, InterleavedMlp)
            assert _is_fused(entry)
            assert _is_fused(out)
            x, y = out.normed(layer.mixer.mix(entry(y), batch), x, layer.post_norm)
            inner = mlp.activated(y)
            if following is None:
                return mlp.down(inner, x)
            x, y = mlp.down.normed(inner, x, following.input_norm)
        return x


def _max_fused_tokens(layer: DecoderLayer) -> int:
    """The largest step in which this layer is fused; 0: none."""
    if not isinstance(layer.mlp, DenseMlp) or layer.mlp.gate_up.num_out % (2 * INTERLEAVE_ROWS):
        return 0
    matrices = (layer.mixer.entry, layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)
    return min(each.max_fused_tokens if _is_fused(each) else 0 for each in matrices)


def _is_fused(linear: Linear) -> TypeGuard[FusedLinear]:
    return isinstance(linear, FusedLinear)


def _interleaved_mlp(layer: DecoderLayer) -> InterleavedMlp:
    assert isinstance(layer.mlp, DenseMlp)
    gate_up, down = layer.mlp.gate_up, layer.mlp.down
    assert _is_fused(gate_up)
    assert _is_fused(down)
    gate_up.interleave_gate_up()
    return InterleavedMlp(gate_up, down)
