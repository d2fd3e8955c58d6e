"""Weights for a model that has a shape but no files: made up on the device itself, at its speed.

Matrices keep the size of activations, norms are close to one, the recurrence forgets at the pace trained models
do: activations stay finite through any number of layers. A tensor depends on its name alone, not on the order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.load.random.model import RandomCheckpoint
from slipstream.load.tensor import Checkpoint
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.ops import HeadShape, Linear, Ops
from slipstream.runners.torch.weights import LinearFormat, Weights

SPREAD = 0.02  # of norm weights and biases
DECAY_RATES = (1.0, 16.0)  # exp(A_log), uniform
TIME_STEPS = (1e-3, 1e-1)  # softplus(dt_bias), uniform on a log scale


def open_weights(checkpoint: Checkpoint, ops: Ops, form: LinearFormat, progress: Callable[[int], None]) -> Weights:
    kind = RandomWeights if isinstance(checkpoint, RandomCheckpoint) else Weights
    return kind(checkpoint, ops, form, progress)


class RandomWeights(Weights):
    """A merged matrix is made in one piece, so no second copy of it ever exists."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty(shape, device=self.ops.device, dtype=dtype or self.ops.dtype)
        self._fill(made, name)
        self._made(name)
        return made

    def _linear(self, names: Sequence[str], outs: Sequence[int], num_in: int, bias: bool) -> Linear:
        biases = [self.tensor(f"{n}.bias", (out,)) for n, out in zip(names, outs, strict=True)] if bias else []
        matrix = self._matrix_of([f"{n}.weight" for n in names], (sum(outs), num_in))
        return self.form.of(names[0]).dense(matrix, torch.cat(biases) if biases else None)

    def _gated_qkv(self, names: Sequence[str], heads: HeadShape, num_in: int) -> Linear:
        num_rows = 2 * (heads.num_q + heads.num_kv) * heads.dim
        return self.form.of(names[0]).dense(self._matrix_of([f"{n}.weight" for n in names], (num_rows, num_in)))

    def experts(self, name: str, count: int, inner: int, hidden: int) -> Experts:
        gate_up = self._matrix_of([f"{name}.gate_up_proj"], (count, 2 * inner, hidden))
        return self.form.dense_experts(gate_up, self._matrix_of([f"{name}.down_proj"], (count, hidden, inner)))

    def _matrix_of(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """The tensors of ``names`` below each other."""
        assert sum(math.prod(self.checkpoint.shape(name)) for name in names) == math.prod(shape), names
        made = torch.empty(shape, device=self.ops.device, dtype=torch.bfloat16)
        self._fill(made, names[0])
        for name in names:
            self._made(name)
        return made

    def _made(self, name: str) -> None:
        self._progress(self.checkpoint.num_bytes(name))

    def _fill(self, made: Tensor, name: str) -> None:
        generator = torch.Generator(self.ops.device).manual_seed(zlib.crc32(name.encode()))
        if made.ndim > 1:
            made.normal_(0.0, made.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("A_log"):
            made.uniform_(*DECAY_RATES, generator=generator).log_()
        elif name.endswith("dt_bias"):
            step = made.uniform_(*map(math.log, TIME_STEPS), generator=generator).exp_()
            step.expm1_().log_()  # the inverse of softplus
        else:
            made.normal_(self._middle(name), SPREAD, generator=generator)

    def _middle(self, name: str) -> float:
        """Of a vector: norms multiply by about one, biases add about nothing."""
        stored_less_one = self.checkpoint.spec.norm_plus_one and "linear_attn.norm" not in name
        return 1.0 if "norm" in name and not stored_less_one else 0.0
