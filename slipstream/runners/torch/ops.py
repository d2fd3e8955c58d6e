"""The array operations a model is written in, in plain PyTorch: any device, any float type.

This is the reference. `cpu/` offers the same interface in C for float32 activations; a test holds the two equal.
Knows tensors only: no requests, no scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.load.spec import GdnSpec
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.caches import GdnLayerCache, LayerKv
from slipstream.runners.torch.gdn import gdn_mix
from slipstream.runners.torch.sampling.logprobs import log_probabilities
from slipstream.runners.torch.sampling.noise import gumbel_noise


class Linear(Protocol):
    """y = x W^T (+ bias) (+ add), whatever the storage format of W. The result may overwrite ``add``."""

    @property
    def num_out(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor: ...

    def rows(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` of W, as activations: an embedding."""
        ...

    def for_drafts(self, num_rows: int) -> Linear:
        """Its first rows, as cheap as the device likes them: drafts need not be exact."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    @property
    def num_out(self) -> int:
        return self.weight.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        return y if add is None else y + add

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]

    def for_drafts(self, num_rows: int) -> DenseLinear:
        assert self.bias is None
        return DenseLinear(self.weight[:num_rows])


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """A matrix whose columns are stored in an order of their own, as GPTQ's act-order leaves them: so is its input."""

    linear: Linear
    order: Tensor  # int64 [in]: stored column i is column order[i]
    inverse: Tensor  # int64 [in]: column i is stored as column inverse[i]

    @property
    def num_out(self) -> int:
        return self.linear.num_out

    @property
    def num_bytes(self) -> int:
        return self.linear.num_bytes + self.order.nbytes + self.inverse.nbytes

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.linear(x.index_select(-1, self.order), add)

    def rows(self, ids: Tensor) -> Tensor:
        return self.linear.rows(ids).index_select(-1, self.inverse)

    def for_drafts(self, num_rows: int) -> Linear:
        return ReorderedLinear(self.linear.for_drafts(num_rows), self.order, self.inverse)


def order_bytes(num_in: int) -> int:
    """What a ``ReorderedLinear`` takes besides its matrix."""
    return 2 * num_in * torch.int64.itemsize


@runtime_checkable
class WritingLinear(Protocol):
    """A Linear that needs no result of its own."""

    def write(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        """The product into ``out``, which may be some columns of a wider result, as ``add`` then is."""
        ...


@dataclass(frozen=True, slots=True)
class LinearStack:
    """One matrix whose parts, stacked along the output, differ in their types or in the order of their columns: a
    product each."""

    parts: tuple[Linear, ...]

    @property
    def num_out(self) -> int:
        return sum(part.num_out for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        out, write = x.new_empty(x.shape[0], self.num_out), self.writer(x)
        start = 0
        for part in self.parts:
            columns = slice(start, start + part.num_out)
            write(part, out[:, columns], None if add is None else add[:, columns])
            start = columns.stop
        return out

    def writer(self, x: Tensor) -> Callable[[Linear, Tensor, Tensor | None], None]:
        """What writes the product of one part and x, plus the last argument, into its columns."""

        def write(part: Linear, out: Tensor, add: Tensor | None) -> None:
            if isinstance(part, WritingLinear):
                part.write(x, out, add)
            else:
                out[:] = part(x) if add is None else part(x) + add

        return write

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("an embedding is one matrix")

    def for_drafts(self, num_rows: int) -> Linear:
        raise NotImplementedError("an output matrix is one matrix")


@dataclass(frozen=True, slots=True)
class Rotary:
    cos: Tensor  # [max positions, rotary_dim / 2]
    sin: Tensor  # [max positions, rotary_dim / 2]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How attention splits its channels."""

    num_q: int
    num_kv: int
    dim: int

    @property
    def qkv_width(self) -> int:
        return (self.num_q + 2 * self.num_kv) * self.dim


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """The weights of a Gated DeltaNet layer besides its matrices."""

    conv: Tensor  # [kernel, channels]
    decay_scale: Tensor  # [v heads]: -exp(A_log), float32
    dt_bias: Tensor  # [v heads], float32
    norm: Tensor  # [v dim]: plain weights, unlike the model's other norms
    eps: float
    spec: GdnSpec


class Ops(Protocol):
    """``batch`` is this runner's own kind of batch; a model hands it on unread."""

    device: torch.device
    dtype: torch.dtype  # of activations and caches

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def concat_norm(self, a: Tensor, weight_a: Tensor, b: Tensor, weight_b: Tensor, eps: float) -> Tensor:
        """Both normalised, side by side."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_store(
        self,
        qkv: Tensor,  # [tokens, qkv_width]
        heads: HeadShape,
        rotary: Rotary,
        kv: LayerKv,
        batch: Any,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """Normalise (if asked) and rotate q and k, write k and v into the cache; returns q [tokens, q width]."""
        ...

    def attend(self, q: Tensor, heads: HeadShape, kv: LayerKv, batch: Any, gate: Tensor | None) -> Tensor:
        """[tokens, q width], multiplied with sigmoid(gate) if there is one."""
        ...

    def gdn(self, mixed: Tensor, weights: GdnWeights, cache: Any, batch: Any) -> Tensor:
        """mixed: [tokens, ...] conv channels (q, k, v), z, b, a -> [tokens, v heads * v dim], normed and gated."""
        ...

    def argmax(self, logits: Tensor) -> Tensor: ...

    def gumbel_argmax(self, logits: Tensor, inv_temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor: ...

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-probabilities, a copy. float32 [rows, vocab]"""
        ...

    def confidence(self, logits: Tensor) -> Tensor:
        """The largest probability of each row. [rows]"""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor  # [hidden]
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


def wide(x: Tensor) -> Tensor:
    """At least float32, for sums that need it."""
    return x if x.dtype == torch.float64 else x.float()


class TorchOps:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = wide(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        return (y * wide(weight)).to(x.dtype)

    def concat_norm(self, a: Tensor, weight_a: Tensor, b: Tensor, weight_b: Tensor, eps: float) -> Tensor:
        return concat_norm(self, a, weight_a, b, weight_b, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def rope_store(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rotary: Rotary,
        kv: LayerKv,
        batch: RaggedBatch,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        num_tokens = qkv.shape[0]
        widths = [heads.num_q * heads.dim, heads.num_kv * heads.dim, heads.num_kv * heads.dim]
        q, k, v = (part.view(num_tokens, -1, heads.dim) for part in qkv.split(widths, dim=-1))
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], norms[2]), self.rms_norm(k, norms[1], norms[2])
        positions, rope_positions = batch.positions.long(), batch.rope_positions.long()
        q, k = _rotate(q, rotary, rope_positions), _rotate(k, rotary, rope_positions)
        block_size = kv.k.shape[2]
        block = batch.block_table[batch.token_slots.long(), positions // block_size].long()  # [tokens]
        kv.write(block, positions % block_size, k, v)
        return q.reshape(num_tokens, -1)

    def attend(
        self, q: Tensor, heads: HeadShape, kv: LayerKv, batch: RaggedBatch, gate: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q)
        for row in batch.rows:
            span = slice(row.offset, row.offset + row.num_fed)
            blocks = batch.block_table[row.slot, : -(-(row.start + row.num_fed) // kv.k.shape[2])].long()
            out[span] = self._attend_row(q[span], heads, kv, blocks, batch.positions[span])
        return out if gate is None else out * torch.sigmoid(gate)

    def _attend_row(self, q: Tensor, heads: HeadShape, kv: LayerKv, blocks: Tensor, positions: Tensor) -> Tensor:
        num_new, end = q.shape[0], blocks.shape[0] * kv.k.shape[2]
        # [kv heads, end, dim]
        k, v = (x.transpose(0, 1).reshape(heads.num_kv, end, heads.dim) for x in kv.read(blocks, q.dtype))
        # [kv heads, group, new, dim]
        grouped = q.view(num_new, heads.num_kv, -1, heads.dim).permute(1, 2, 0, 3)
        scores = wide(grouped @ k[:, None].transpose(-1, -2)) * heads.dim**-0.5
        ahead = torch.arange(end, device=q.device) > positions[:, None]  # [new, end]
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1).to(q.dtype)
        mixed: Tensor = weights @ v[:, None]
        return mixed.permute(2, 0, 1, 3).reshape(num_new, -1)

    def gdn(self, mixed: Tensor, weights: GdnWeights, cache: GdnLayerCache, batch: RaggedBatch) -> Tensor:
        return gated_delta_net(self, mixed, weights, cache, batch)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def gumbel_argmax(self, logits: Tensor, inv_temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        noise = gumbel_noise(seeds, positions, logits.shape[-1])
        return (wide(logits) * inv_temperature[:, None] + noise).argmax(-1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return log_probabilities(logits)

    def confidence(self, logits: Tensor) -> Tensor:
        return wide(logits).softmax(-1).amax(-1)


def concat_norm(ops: Ops, a: Tensor, weight_a: Tensor, b: Tensor, weight_b: Tensor, eps: float) -> Tensor:
    """The reference of ``Ops.concat_norm``, with the operations' own norm."""
    return torch.cat([ops.rms_norm(a, weight_a, eps), ops.rms_norm(b, weight_b, eps)], dim=-1)


def gated_delta_net(ops: Ops, mixed: Tensor, weights: GdnWeights, cache: GdnLayerCache, batch: RaggedBatch) -> Tensor:
    """The reference of ``Ops.gdn``, around the operations' own norm."""
    gdn = weights.spec
    widths = [gdn.conv_channels, gdn.num_v_heads * gdn.v_dim, gdn.num_v_heads, gdn.num_v_heads]
    conv_in, z, b, a = mixed.split(widths, dim=-1)
    decay = weights.decay_scale * torch.nn.functional.softplus(wide(a) + weights.dt_bias)
    gates = torch.stack([decay, wide(b).sigmoid()], dim=1)
    heads = gdn_mix(conv_in, gates, weights.conv, gdn, cache, batch).unflatten(-1, (gdn.num_v_heads, gdn.v_dim))
    normed = wide(ops.rms_norm(heads, weights.norm, weights.eps)).flatten(1)
    return (normed * torch.nn.functional.silu(wide(z))).to(mixed.dtype)


def _rotate(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Half-split rotary on the first 2 * cos.shape[1] channels of each head. x: [tokens, heads, dim]"""
    half = rotary.cos.shape[1]
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
    low, high = wide(x[..., :half]), wide(x[..., half : 2 * half])
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)
