"""Llama-type dense decoders: Llama, SmolLM2, Qwen2 (biased q/k/v), Qwen3 (normalised q/k)."""

from __future__ import annotations

from slipstream.load.spec import ModelSpec
from slipstream.runners.torch.caches import LayerCache, LayerKv
from slipstream.runners.torch.models.layers import DecoderLayer, load_attention, load_mlp, load_norm
from slipstream.runners.torch.ops import Rotary
from slipstream.runners.torch.weights import Weights


def load_layer(weights: Weights, name: str, spec: ModelSpec, rotary: Rotary, cache: LayerCache) -> DecoderLayer:
    assert isinstance(cache, LayerKv)
    return DecoderLayer(
        load_norm(weights, f"{name}.input_layernorm", spec),
        load_attention(weights, f"{name}.self_attn", spec, rotary, cache),
        load_norm(weights, f"{name}.post_attention_layernorm", spec),
        load_mlp(weights, f"{name}.mlp", spec.hidden_size, spec.intermediate_size),
    )
