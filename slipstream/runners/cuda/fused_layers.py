"""Dense layers in fewer launches: norms and activations are done by the products around them (matmul/linear.py).

For steps of few tokens; larger ones, and layers that have other parts, run as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from slipstream.runners.cuda.kernels.elementwise import silu_mul
from slipstream.runners.cuda.kernels.matmul.linear import Unscaled
from slipstream.runners.cuda.kernels.matmul.product import STRIPE_ROWS
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.models.layers import DecoderLayer, DenseMlp, InTurn, Layers
from slipstream.runners.torch.ops import Linear, RmsNorm


@runtime_checkable
class JoinedLinear(Protocol):
    """A matrix whose product does what surrounds it."""

    @property
    def num_out(self) -> int: ...

    @property
    def most_joined(self) -> int:
        """Tokens; 0: it does not."""
        ...

    def __call__(self, x: Tensor | Unscaled, add: Tensor | None = None) -> Tensor: ...

    def normed(self, x: Tensor, add: Tensor, norm: RmsNorm) -> tuple[Tensor, Unscaled]:
        """x W^T + add, and that normalised."""
        ...

    def stripe(self) -> None:
        """Of a matrix with gate and up one below the other: bring their rows into the order that ``gated`` takes."""
        ...

    def gated(self, x: Tensor | Unscaled) -> Tensor:
        """silu(gate x) * up x"""
        ...


def stack(layers: Sequence[DecoderLayer]) -> Layers:
    """Takes the layers over: what they multiply with may lie in another order afterwards."""
    most = min(_most_joined(layer) for layer in layers)
    return Joined([replace(layer, mlp=_striped_mlp(layer)) for layer in layers], most) if most else InTurn(layers)


@dataclass(frozen=True, slots=True)
class StripedMlp:
    gate_up: JoinedLinear  # rows of gate and of up in stripes
    down: JoinedLinear

    def __call__(self, x: Tensor, norm: RmsNorm, batch: Batch) -> Tensor:
        return self.down(self.activated(norm(x)), x)

    def activated(self, x: Tensor | Unscaled) -> Tensor:
        """silu(gate x) * up x"""
        return (
            self.gate_up.gated(x) if x.shape[0] <= self.gate_up.most_joined else silu_mul(self.gate_up(x), STRIPE_ROWS)
        )


@dataclass(frozen=True, slots=True)
class Joined(InTurn):
    most_tokens: int  # that all products take

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        if x.shape[0] > self.most_tokens:
            return InTurn.__call__(self, x, batch)
        y: Tensor | Unscaled = self.layers[0].input_norm(x)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            entry, out, mlp = layer.mixer.entry, layer.mixer.out, layer.mlp
            assert isinstance(mlp, StripedMlp)
            assert _does_join(entry)
            assert _does_join(out)
            x, y = out.normed(layer.mixer.mix(entry(y), batch), x, layer.post_norm)
            inner = mlp.activated(y)
            if following is None:
                return mlp.down(inner, x)
            x, y = mlp.down.normed(inner, x, following.input_norm)
        return x


def _most_joined(layer: DecoderLayer) -> int:
    """Tokens; 0: not this layer."""
    if not isinstance(layer.mlp, DenseMlp) or layer.mlp.gate_up.num_out % (2 * STRIPE_ROWS):
        return 0
    matrices = (layer.mixer.entry, layer.mixer.out, layer.mlp.gate_up, layer.mlp.down)
    return min(each.most_joined if _does_join(each) else 0 for each in matrices)


def _does_join(linear: Linear) -> TypeGuard[JoinedLinear]:
    return isinstance(linear, JoinedLinear)


def _striped_mlp(layer: DecoderLayer) -> StripedMlp:
    assert isinstance(layer.mlp, DenseMlp)
    gate_up, down = layer.mlp.gate_up, layer.mlp.down
    assert _does_join(gate_up)
    assert _does_join(down)
    gate_up.stripe()
    return StripedMlp(gate_up, down)
