"""The runner's operations and matrices on the C kernels: float32 activations, weights in packed formats.

Owns which packed format a stored type becomes. The kernels themselves are in ops.py and the C files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.load.tensor import RawTensor
from slipstream.runners.cpu.bindings import BF16, F32, W4, W4M, W8, Kernels, PackedWeight
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.gdn import GdnLayer, fits
from slipstream.runners.cpu.layers import Layer, LayerStack, StackShape
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.caches import GdnLayerCache, LayerKv
from slipstream.runners.torch.experts import Experts
from slipstream.runners.torch.models.layers import Attention, DecoderLayer, DenseMlp, Layers, Mixer, Sequential
from slipstream.runners.torch.models.qwen3_5 import GatedDeltaNet
from slipstream.runners.torch.models.qwen3_5_moe import SparseMlp
from slipstream.runners.torch.ops import GdnWeights, HeadShape, Linear, Rotary, concat_norm, gated_delta_net
from slipstream.runners.torch.weights import LinearFormat, Parts, as_tensor

_AS_STORED = {"Q4_0": W4, "Q4_1": W4M, "Q8_0": W8, "BF16": BF16, "F16": F32, "F32": F32}
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SLAB = 1 << 20  # elements converted at once
_BY_DTYPE = {"float32": F32, "bfloat16": BF16, "int8": W8, "int4": W4M}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    kernels: Kernels
    weight: PackedWeight
    bias: Tensor | None = None  # [out]

    @property
    def num_out(self) -> int:
        return self.weight.rows

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.kernels.linear(x, self.weight, torch.empty(x.shape[0], self.num_out), self.bias, add)

    def rows(self, ids: Tensor) -> Tensor:
        return self.kernels.embed(ids, self.weight)

    def for_drafts(self, num_rows: int) -> PackedLinear:
        """In 4 bits where it is cut anyway: a draft pass reads little else than this matrix."""
        assert self.bias is None
        if num_rows == self.weight.rows or self.weight.cols % 32:
            return PackedLinear(self.kernels, self.weight.slice_rows(num_rows))
        step = max(1, SLAB // self.weight.cols)
        slabs = (torch.arange(at, min(at + step, num_rows)) for at in range(0, num_rows, step))
        rounded = (self.kernels.quantize_w4(self.rows(slab)) for slab in slabs)
        return PackedLinear(self.kernels, self.kernels.gather(num_rows, rounded))


class PackedFormat:
    """``dtype`` auto keeps what the file has where the kernels know it, 8-bit blocks where they do not.

    FP8 is such a case: in 8-bit blocks its products are off by 0.55 to 0.71 % (in BF16: 0.16 %) where FP8 itself
    was off by 2.6 %, in half the bytes and half the time of BF16, which is there for who asks for it (decision 14).
    """

    def __init__(self, kernels: Kernels, dtype: str) -> None:
        self.kernels = kernels
        self._dtype = dtype

    def of(self, name: str) -> LinearFormat:
        return self

    def linear(self, parts: Sequence[RawTensor], bias: Tensor | None) -> Linear:
        return PackedLinear(self.kernels, self._packed(parts), bias)

    def experts(self, gate_up: Sequence[Parts], down: Sequence[Parts]) -> Experts:
        return PackedExperts(self.kernels, *([self._packed(parts) for parts in each] for each in (gate_up, down)))

    def dense_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        return PackedExperts(self.kernels, *([self._pack_dense(matrix) for matrix in each] for each in (gate_up, down)))

    def dense(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        return PackedLinear(self.kernels, self._pack_dense(matrix), bias)

    def stored_bytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if len(shape) < 2 or shape[-2] == 1:  # a vector, or a conv's kernels
            return math.prod(shape) * 4
        *count, rows, cols = shape
        return math.prod(count) * self.kernels.packed_bytes(self._format(dtype, cols), rows, cols)

    def draft_bytes(self, num_rows: int, shape: tuple[int, int]) -> int:
        return 0 if num_rows == shape[0] or shape[1] % 32 else self.kernels.packed_bytes(W4M, num_rows, shape[1])

    def unpacked_bytes(self, shape: tuple[int, int]) -> int:
        return 0

    def _format(self, dtype: str, num_cols: int) -> int:
        chosen = _AS_STORED.get(dtype, W8) if self._dtype == "auto" else _BY_DTYPE[self._dtype]
        return BF16 if chosen in (W8, W4M) and num_cols % 32 else chosen

    def _packed(self, parts: Sequence[RawTensor]) -> PackedWeight:
        return self.kernels.concat([self._pack(part) for part in parts])

    def _pack_dense(self, matrix: Tensor) -> PackedWeight:
        return self._pack_matrix(matrix, self._format(_NAMES[matrix.dtype], matrix.shape[1]))

    def _pack(self, raw: RawTensor) -> PackedWeight:
        """A large matrix slab by slab: what stands between the file and the kernels' layout stays small."""
        slabs = _slabs(raw)
        if len(slabs) == 1:
            return self._pack_slab(raw)
        return self.kernels.gather(raw.shape[0], (self._pack_slab(slab) for slab in slabs))

    def _pack_slab(self, raw: RawTensor) -> PackedWeight:
        form = self._format(raw.dtype, raw.shape[1])
        if _AS_STORED.get(raw.dtype) == form and form in (W4, W4M, W8):
            return self.kernels.pack_blocks(form, torch.from_numpy(raw.data.copy()), raw.shape[1])
        return self._pack_matrix(as_tensor(raw), form)

    def _pack_matrix(self, matrix: Tensor, form: int) -> PackedWeight:
        if form == W8:
            return self.kernels.quantize_w8(matrix)
        if form == W4M:
            return self.kernels.quantize_w4(matrix)
        return self.kernels.pack_float(matrix.to(torch.bfloat16 if form == BF16 else torch.float32))


def _slabs(raw: RawTensor) -> list[RawTensor]:
    rows, cols = raw.shape
    step = max(1, SLAB // cols)
    return [raw.rows(slice(at, at + step)) for at in range(0, rows, step)]


class CpuOps:
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def stack(self, layers: Sequence[DecoderLayer]) -> Layers:
        """One call for all layers where the kernels know them whole; the same bits as layer by layer."""
        packed = [_packed_layer(layer) for layer in layers]
        known = [layer for layer in packed if layer is not None]
        attention = next((layer.mixer for layer in layers if isinstance(layer.mixer, Attention)), None)
        if len(known) < len(layers) or attention is None:
            return Sequential(layers)
        shape = StackShape(attention.heads, attention.rotary, layers[0].input_norm.eps)
        return _FusedLayers(LayerStack(self._kernels, known, shape))

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
        where = (batch.positions, batch.token_slots, batch.block_table)
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


class _FusedLayers:
    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        return self._stack.run(x, batch.positions, batch.token_slots, batch.block_table, batch.rows)


def _packed_layer(layer: DecoderLayer) -> Layer | None:
    """The layer as the C code takes it, or None if it has parts that the C code lacks."""
    mixer, entry, out = layer.mixer, layer.mixer.entry, layer.mixer.out
    dense = layer.mlp.shared if isinstance(layer.mlp, SparseMlp) else layer.mlp
    if not (isinstance(entry, PackedLinear) and isinstance(out, PackedLinear) and isinstance(dense, DenseMlp)):
        return None
    gate_up, down = dense.gate_up, dense.down
    if not (isinstance(gate_up, PackedLinear) and isinstance(down, PackedLinear)):
        return None
    common = Layer(
        layer.input_norm.weight, layer.post_norm.weight, entry.weight, out.weight, gate_up.weight, down.weight,
        entry_bias=entry.bias, out_bias=out.bias,
    )  # fmt: skip
    mixed = _with_mixer(common, mixer)
    return _with_experts(mixed, layer.mlp) if mixed and isinstance(layer.mlp, SparseMlp) else mixed


def _with_mixer(layer: Layer, mixer: Mixer) -> Layer | None:
    if isinstance(mixer, GatedDeltaNet) and isinstance(mixer.cache, GdnLayerCache) and fits(mixer.weights.spec):
        return replace(layer, gdn=GdnLayer(mixer.weights, mixer.cache))
    if not isinstance(mixer, Attention):
        return None
    q_norm, k_norm = mixer.norms[:2] if mixer.norms else (None, None)
    return replace(layer, k_cache=mixer.kv.k, v_cache=mixer.kv.v, q_norm=q_norm, k_norm=k_norm)


def _with_experts(layer: Layer, mlp: SparseMlp) -> Layer | None:
    if not (isinstance(mlp.router, PackedLinear) and isinstance(mlp.experts, PackedExperts)):
        return None
    return replace(layer, router=mlp.router.weight, experts=mlp.experts, num_active=mlp.num_active)
