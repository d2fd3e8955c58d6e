"""A model's layers as one call into the C kernels, where the C code has all their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.cpu.formats import PackedLinear
from slipstream.runners.cpu.gdn import GdnLayer, fits
from slipstream.runners.cpu.layers import Layer, LayerStack, StackShape
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.caches import GdnLayerCache
from slipstream.runners.torch.models.layers import Attention, DecoderLayer, DenseMlp, Layers, Mixer, Sequential
from slipstream.runners.torch.models.qwen3_5 import GatedDeltaNet
from slipstream.runners.torch.models.qwen3_5_moe import SparseMlp


def stack(kernels: Kernels, layers: Sequence[DecoderLayer]) -> Layers:
    """One call for all layers where the kernels know them whole; the same bits as layer by layer."""
    packed = [_packed_layer(layer) for layer in layers]
    known = [layer for layer in packed if layer is not None]
    attention = next((layer.mixer for layer in layers if isinstance(layer.mixer, Attention)), None)
    if len(known) < len(layers) or attention is None:
        return Sequential(layers)
    shape = StackShape(attention.heads, attention.rotary, layers[0].input_norm.eps)
    return FusedLayers(LayerStack(kernels, known, shape))


class FusedLayers:
    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        where = (batch.positions, batch.rope_positions, batch.token_slots, batch.block_table)
        return self._stack.run(x, *where, batch.rows)


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
