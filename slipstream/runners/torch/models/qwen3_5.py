"""Qwen3.5 dense: three Gated DeltaNet layers to one of gated attention, RMSNorm applied as 1 + w."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.batch import Batch
from slipstream.runners.torch.caches import LayerCache, LayerKv, RecurrentCache
from slipstream.runners.torch.models.layers import DecoderLayer, Mixer, Mlp, load_attention, load_mlp, load_norm
from slipstream.runners.torch.ops import GdnWeights, Linear, Ops, Rotary
from slipstream.runners.torch.weights import Weights


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    entry: Linear  # rows: conv channels (q, k, v), z, b, a
    out: Linear
    weights: GdnWeights
    cache: RecurrentCache
    ops: Ops

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        return self.ops.gdn(projected, self.weights, self.cache, batch)


def load_gdn(weights: Weights, name: str, spec: ModelSpec, cache: RecurrentCache) -> GatedDeltaNet:
    gdn = spec.gdn
    assert gdn is not None
    value = gdn.num_v_heads * gdn.v_dim
    parts = [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    outs = [gdn.conv_channels, value, gdn.num_v_heads, gdn.num_v_heads]
    conv = weights.tensor(f"{name}.conv1d.weight", (gdn.conv_channels, 1, gdn.conv_kernel))
    entry = weights.linear(parts, outs, spec.hidden_size, role="column")
    out = weights.linear([f"{name}.out_proj"], [spec.hidden_size], value, role="row")
    others = GdnWeights(
        conv=conv[:, 0].T.contiguous(),
        decay_scale=-weights.vector(f"{name}.A_log", gdn.num_v_heads).exp(),
        dt_bias=weights.vector(f"{name}.dt_bias", gdn.num_v_heads),
        norm=weights.vector(f"{name}.norm.weight", gdn.v_dim),
        eps=spec.norm_eps,
        spec=gdn,
    )
    return GatedDeltaNet(entry, out, others, cache, weights.ops)


def load_layer(weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, cache: LayerCache) -> DecoderLayer:
    mlp = load_mlp(weights, f"{name}.mlp", spec.hidden_size, spec.intermediate_size)
    return hybrid_layer(weights, name, spec, rotary, cache, mlp)


def hybrid_layer(
    weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, cache: LayerCache, mlp: Mlp
) -> DecoderLayer:
    """Attention or recurrence, as the layer's cache says, around the family's own MLP."""
    mixer: Mixer
    if not isinstance(cache, LayerKv):
        mixer = load_gdn(weights, f"{name}.linear_attn", spec, cache)
    else:
        mixer = load_attention(weights, f"{name}.self_attn", spec, rotary, cache)
    input_norm = load_norm(weights, f"{name}.input_layernorm", spec)
    return DecoderLayer(input_norm, mixer, load_norm(weights, f"{name}.post_attention_layernorm", spec), mlp)
