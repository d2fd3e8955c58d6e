"""config.json -> ModelSpec, for every supported architecture. Refuses, by name, models that we would compute wrongly.

Knows nothing of weights. Defaults are those the architectures' own configurations fall back to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import Fields
from slipstream.load.hf.instead import OTHER_MODEL, PUBLISHED_CONFIG
from slipstream.load.spec import (
    Architecture,
    GdnSpec,
    HeadSpec,
    LayerKind,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    YarnSpec,
    all_full_attention,
    yarn_scale,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_5_moe",  # the same layers, some matrices joined
}
HYBRID: tuple[Architecture, ...] = ("qwen3_5", "qwen3_5_moe")
DEFAULT_HEAD_DIM: dict[Architecture, int] = {"qwen3": 128, "qwen3_5": 256, "qwen3_5_moe": 256}


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str, name: str = "") -> ModelSpec:
    """`config` and `generation` are the parsed config.json and generation_config.json; `where` is for messages."""
    outer = Fields(config, where)
    text = outer.level("text_config") if outer.raw("text_config") is not None else outer
    architecture = _architecture(outer)
    _refuse_unsupported(outer, text, architecture)
    heads = text.size("num_attention_heads")
    head_dim = _head_dim(text, architecture, heads)
    biased = text.flag("attention_bias")
    hybrid = architecture in HYBRID
    return ModelSpec(
        architecture=architecture,
        hidden_size=text.size("hidden_size"),
        num_layers=text.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(text, heads),
        head_dim=head_dim,
        intermediate_size=0 if architecture == "qwen3_5_moe" else text.size("intermediate_size"),
        vocab_size=text.size("vocab_size"),
        max_context=context_length(text, 2048 if architecture == "llama" else 32768),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=_rope(text, head_dim, 0.25 if hybrid else 1.0),
        tied=outer.flag("tie_word_embeddings") or text.flag("tie_word_embeddings"),
        layer_kinds=_layer_kinds(text, hybrid),
        qkv_bias=biased or architecture == "qwen2",
        o_bias=biased and architecture != "qwen2",
        qk_norm=hybrid or architecture == "qwen3",
        gated_attention=hybrid,
        norm_plus_one=hybrid,
        gdn=gdn_of(text) if hybrid else None,
        moe=_moe(text, outer.raw("model_type") == "qwen3_next") if architecture == "qwen3_5_moe" else None,
        head=HeadSpec(num_declared_layers=text.count("mtp_num_hidden_layers", 0)),
        eos_token_ids=eos_tokens(Fields(generation, where), outer, text),
        name=name,
    )


def _architecture(outer: Fields) -> Architecture:
    model_type = outer.text("model_type")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnknownModel(
            f"{outer.where}: model type {model_type!r} is not one of {known}: take a model of one of these, or "
            "--runner mlx if mlx-lm knows it."
        )
    return ARCHITECTURES[model_type]


def _refuse_unsupported(outer: Fields, text: Fields, architecture: Architecture) -> None:
    if (act := text.text("hidden_act", "silu")) != "silu":
        raise _unsupported(outer, f"an MLP whose activation is {act!r} and not 'silu'")
    if text.flag("mlp_bias"):
        raise _unsupported(outer, "an MLP with biases (mlp_bias)")
    if architecture in HYBRID and not text.flag("attn_output_gate", True):
        raise _unsupported(outer, f"{architecture} without the attention's output gate (attn_output_gate)")
    if _uses_window(outer, text):
        raise _unsupported(outer, "sliding-window attention")


def _unsupported(level: Fields, what: str) -> UnknownModel:
    return UnknownModel(f"{level.where}: {what} is not supported: {OTHER_MODEL}.")


def _inconsistent(level: Fields, why: str) -> CorruptFile:
    return CorruptFile(f"{level.where}: {why}: {PUBLISHED_CONFIG}.")


def quantisation(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What config.json says about it, at either level; empty: nothing. Tensors say how they are stored."""
    outer = Fields(config, where)
    text = outer.level("text_config")
    return outer.level("quantization_config").values or text.level("quantization_config").values


def _uses_window(outer: Fields, text: Fields) -> bool:
    window = text.values.get("sliding_window", 4096)
    if type(window) is int and window >= text.size("max_position_embeddings", 32768):
        return False
    if outer.raw("model_type") == "mistral":
        return window is not None
    if types := _layer_types(text):
        return "sliding_attention" in types
    beyond = text.count("max_window_layers", 28) < text.layers("num_hidden_layers")
    return window is not None and beyond and text.flag("use_sliding_window")


def _head_dim(text: Fields, architecture: Architecture, heads: int) -> int:
    hidden = text.size("hidden_size")
    default = DEFAULT_HEAD_DIM.get(architecture, hidden // heads)
    if text.raw("head_dim") is None and architecture not in DEFAULT_HEAD_DIM and hidden % heads:
        raise _inconsistent(text, f"hidden_size {hidden} does not divide into {heads} attention heads")
    return text.size("head_dim", default)


def _kv_heads(text: Fields, heads: int) -> int:
    kv_heads = text.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise _inconsistent(text, f"{heads} attention heads cannot share {kv_heads} key-value heads")
    return kv_heads


def context_length(text: Fields, default: int) -> int:
    yarn = _yarn(text)
    return text.size("max_position_embeddings", default) if yarn is None else yarn.context


def _rope_fields(text: Fields) -> Fields:
    return text.level("rope_parameters" if text.raw("rope_parameters") is not None else "rope_scaling")


def _rope_type(rope: Fields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _rope(text: Fields, head_dim: int, default_part: float) -> RopeSpec:
    rope = _rope_fields(text)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise _unsupported(rope, "a rotary embedding that differs by layer")
    part = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", default_part))
    theta = rope.number("rope_theta", text.number("rope_theta", 10000.0))
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise _inconsistent(rope, f"{part} of a head of {head_dim} is not an even number of rotary dimensions")
    kind = _rope_type(rope)
    if kind == "llama3":
        return _llama3_rope(rope, text, theta, rotary_dim)
    if kind not in ("default", "yarn"):
        raise _unsupported(rope, f"rotary scaling of type {kind!r}")
    return RopeSpec(theta, rotary_dim, yarn=_yarn(text))


def _yarn(text: Fields) -> YarnSpec | None:
    rope = _rope_fields(text)
    if _rope_type(rope) != "yarn":
        return None
    factor = rope.number("factor")
    original = rope.context("original_max_position_embeddings", text.size("max_position_embeddings", 32768))
    return YarnSpec(
        factor=factor,
        original_context=text.context("original_max_position_embeddings", original),
        fast_turns=rope.number("beta_fast", 32.0),
        slow_turns=rope.number("beta_slow", 1.0),
        whole_bounds=rope.flag("truncate", True),
        rotary_scale=rope.number("attention_factor", _yarn_scale(rope, factor)),
    )


def _yarn_scale(rope: Fields, factor: float) -> float:
    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        return yarn_scale(factor, rope.number("mscale")) / yarn_scale(factor, rope.number("mscale_all_dim"))
    return yarn_scale(factor)


def _llama3_rope(rope: Fields, text: Fields, theta: float, rotary_dim: int) -> RopeSpec:
    return RopeSpec(
        theta,
        rotary_dim,
        llama3_factor=rope.number("factor"),
        llama3_low_freq=rope.number("low_freq_factor"),
        llama3_high_freq=rope.number("high_freq_factor"),
        llama3_original_context=rope.size(
            "original_max_position_embeddings", text.size("max_position_embeddings", 2048)
        ),
    )


def _layer_types(text: Fields) -> list[str]:
    types = text.raw("layer_types")
    if types is None:
        return []
    if not isinstance(types, list) or len(types) != text.layers("num_hidden_layers"):
        raise _inconsistent(text, "layer_types should name the kind of each of the num_hidden_layers layers")
    return types


def _layer_kinds(text: Fields, hybrid: bool) -> tuple[LayerKind, ...]:
    num_layers = text.layers("num_hidden_layers")
    types = _layer_types(text)
    if not hybrid:
        # A window that is as long as the context is no window.
        for kind in types:
            _layer_kind(text, kind, allowed=("full_attention", "sliding_attention"))
        return all_full_attention(num_layers)
    if types:
        return tuple(_layer_kind(text, kind) for kind in types)
    kinds = ("linear_attention", "full_attention")
    interval = text.size("full_attention_interval", 4)
    return tuple(_layer_kind(text, kinds[(i + 1) % interval == 0]) for i in range(num_layers))


def _layer_kind(
    text: Fields, kind: str, allowed: tuple[str, ...] = ("full_attention", "linear_attention")
) -> LayerKind:
    if kind not in allowed:
        raise _unsupported(text, f"a layer of type {kind!r} in this architecture")
    return "linear_attention" if kind == "linear_attention" else "full_attention"


def gdn_of(text: Fields) -> GdnSpec:
    gdn = GdnSpec(
        num_k_heads=text.size("linear_num_key_heads", 16),
        num_v_heads=text.size("linear_num_value_heads", 32),
        k_dim=text.size("linear_key_head_dim", 128),
        v_dim=text.size("linear_value_head_dim", 128),
        conv_kernel=text.size("linear_conv_kernel_dim", 4),
    )
    if gdn.num_v_heads % gdn.num_k_heads:
        raise _inconsistent(text, f"{gdn.num_v_heads} linear value heads cannot share {gdn.num_k_heads} keys")
    return gdn


def _moe(text: Fields, next_model: bool) -> MoeSpec:
    if next_model:
        _refuse_mixed_layers(text)
    return MoeSpec(
        num_experts=text.size("num_experts", 512 if next_model else 256),
        num_active=text.size("num_experts_per_tok", 10 if next_model else 8),
        expert_size=text.size("moe_intermediate_size", 512),
        shared_size=text.size("shared_expert_intermediate_size", 512),
    )


def _refuse_mixed_layers(text: Fields) -> None:
    """Qwen3-Next's options that no published model uses."""
    if has_mixed_layers(text):
        raise _unsupported(text, "a mixture of layers with experts and layers without")
    if not text.flag("norm_topk_prob", True):
        raise _unsupported(text, "a router whose shares do not add up to 1 (norm_topk_prob)")


def has_mixed_layers(text: Fields) -> bool:
    """Qwen3-Next: layers without experts among those with them."""
    return bool(text.raw("mlp_only_layers")) or text.size("decoder_sparse_step", 1) != 1


def eos_tokens(generation: Fields, outer: Fields, text: Fields) -> tuple[int, ...]:
    levels = (generation, outer, text)
    return next((ids for level in levels if (ids := level.token_ids("eos_token_id"))), ())
