"""The parts that decoder families share: norms, attention, dense MLP, rotary tables.

A layer takes and returns [tokens, hidden] and writes its own cache. It knows nothing of requests or acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.load.spec import ModelSpec, RopeSpec, YarnSpec
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.caches import LayerKv
from slipstream.runners.torch.ops import HeadShape, Linear, Ops, RmsNorm, Rotary
from slipstream.runners.torch.weights import Weights


def load_norm(weights: Weights, name: str, spec: ModelSpec, size: int | None = None) -> RmsNorm:
    weight = weights.vector(f"{name}.weight", size or spec.hidden_size)
    return RmsNorm(weight + 1.0 if spec.norm_plus_one else weight, spec.norm_eps, weights.ops)


class Mlp(Protocol):
    def __call__(self, x: Tensor, norm: RmsNorm, batch: Batch) -> Tensor:
        """x + mlp(norm(x))"""
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: Linear
    down: Linear
    ops: Ops

    def __call__(self, x: Tensor, norm: RmsNorm, batch: Batch) -> Tensor:
        return self.alone(norm(x), x)

    def alone(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """mlp(x) of an x that is already normalised."""
        return self.down(self.ops.silu_mul(self.gate_up(x)), add)


def load_mlp(weights: Weights, name: str, hidden: int, inner: int) -> DenseMlp:
    gate_up = weights.linear([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], hidden, role="column")
    return DenseMlp(gate_up, weights.linear([f"{name}.down_proj"], [hidden], inner, role="row"), weights.ops)


class Mixer(Protocol):
    """Attention or recurrence: mixes the tokens of a row, between two matrices."""

    @property
    def entry(self) -> Linear: ...

    @property
    def out(self) -> Linear: ...

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        """From the output of ``entry`` to the input of ``out``."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    entry: Linear  # rows: query heads, key heads, value heads, and the output gate's if there is one
    out: Linear
    heads: HeadShape
    gated: bool
    norms: tuple[Tensor, Tensor, float] | None
    rotary: Rotary
    kv: LayerKv
    ops: Ops

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        width = self.heads.qkv_width
        qkv, gate = (projected[:, :width], projected[:, width:]) if self.gated else (projected, None)
        q = self.ops.rope_store(qkv, self.heads, self.rotary, self.kv, batch, self.norms)
        return self.ops.attend(q, self.heads, self.kv, batch, gate)


def load_attention(weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, kv: LayerKv) -> Attention:
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    q_width, kv_width = heads.num_q * heads.dim, heads.num_kv * heads.dim
    names = [f"{name}.{part}_proj" for part in ("q", "k", "v")]
    if spec.gated_attention:
        qkv = weights.gated_qkv(names, heads, spec.hidden_size)
    else:
        widths = [q_width, kv_width, kv_width]
        qkv = weights.linear(names, widths, spec.hidden_size, role="column", bias=spec.qkv_bias)
    out = weights.linear([f"{name}.o_proj"], [spec.hidden_size], q_width, role="row", bias=spec.o_bias)
    norms = None
    if spec.qk_norm:
        q_norm, k_norm = (load_norm(weights, f"{name}.{part}_norm", spec, heads.dim) for part in ("q", "k"))
        norms = (q_norm.weight, k_norm.weight, spec.norm_eps)
    return Attention(qkv, out, heads, spec.gated_attention, norms, rotary, kv, weights.ops)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: RmsNorm
    mixer: Mixer
    post_norm: RmsNorm
    mlp: Mlp

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        mixed = self.mixer.mix(self.mixer.entry(self.input_norm(x)), batch)
        return self.mlp(self.mixer.out(mixed, x), self.post_norm, batch)


class Layers(Protocol):
    """Several layers, one after the other."""

    def __call__(self, x: Tensor, batch: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Sequential:
    layers: Sequence[DecoderLayer]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x


def rotary_table(rope: RopeSpec, max_positions: int, device: torch.device) -> Rotary:
    inv_freq = rope.theta ** -(torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim)
    if rope.llama3_factor is not None:
        inv_freq = _llama3_scaled(inv_freq, rope, rope.llama3_factor)
    if rope.yarn is not None:
        inv_freq = _yarn_scaled(inv_freq, rope, rope.yarn)
    scale = 1.0 if rope.yarn is None else rope.yarn.rotary_scale
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq.float()
    return Rotary((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))


def _llama3_scaled(inv_freq: Tensor, rope: RopeSpec, factor: float) -> Tensor:
    """Llama 3.1: long wavelengths slowed by ``factor``, short ones kept, a linear blend between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = rope.llama3_low_freq, rope.llama3_high_freq
    blend = ((rope.llama3_original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * (1 - blend) + inv_freq * blend


def _yarn_scaled(inv_freq: Tensor, rope: RopeSpec, yarn: YarnSpec) -> Tensor:
    """YaRN: the frequencies of slow rotations divided by ``factor``, fast ones kept, a linear blend between."""
    turns = torch.tensor([yarn.fast_turns, yarn.slow_turns], dtype=inv_freq.dtype)
    # The dimensions that rotate so often in the original context.
    first, last = rope.rotary_dim * (yarn.original_context / (2 * math.pi * turns)).log() / (2 * math.log(rope.theta))
    if yarn.whole_bounds:
        first, last = first.floor(), last.ceil()
    first, last = first.clamp(min=0), last.clamp(max=rope.rotary_dim - 1)
    width = last - first if last != first else 0.001
    # [rotary_dim / 2]
    blend = ((torch.arange(len(inv_freq), dtype=inv_freq.dtype) - first) / width).clamp(0, 1)
    scaled: Tensor = inv_freq / yarn.factor * blend + inv_freq * (1 - blend)
    return scaled
