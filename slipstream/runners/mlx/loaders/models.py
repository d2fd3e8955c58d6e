"""From an opened checkpoint to an mlx-lm model with its weights.

A folder is loaded by mlx-lm itself, whatever its architecture and quantisation, without the MTP head, which mlx-lm does
not know. A GGUF becomes the model class of its architecture with the weights as they are packed; so does a folder that
another tool quantised, if we know its architecture.
"""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5, qwen3_5_moe
from mlx_lm.utils import _get_classes as get_classes
from mlx_lm.utils import infer_quant_config, load_config, load_model

from slipstream.errors import ConfigError, UnknownModel
from slipstream.load import OpenedModel
from slipstream.load.hf.joined_projections import parts_of_joined
from slipstream.load.spec import GdnSpec, HeadSpec, ModelSpec, RopeSpec
from slipstream.runners.backend import Progress, ignore_progress
from slipstream.runners.mlx.loaders.folder_weights import check_readable, check_types, folder_rules, is_packed
from slipstream.runners.mlx.loaders.gguf_weights import gguf_rules
from slipstream.runners.mlx.loaders.parameters import evaluate, parameters, slab_bytes, source_bytes

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
FIRST_EXPERT = re.compile(
    r"(?P<mlp>.+\.mlp)\.experts\.0\.(?P<part>(gate_proj|up_proj|down_proj)\.(weight|scales|biases))"
)
NEXT_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}  # where Qwen3-Next's config.json has none

Tensors = dict[str, mx.array]


def load_target(model: OpenedModel, dtype_name: str, progress: Progress = ignore_progress) -> Any:
    """``dtype_name``: of everything that is not packed, as in RunnerConfig. Its arrays are evaluated."""
    loaded = _load(model, dtype_name, progress)
    told = not _is_mlx_lms(model)  # what is left to evaluate is what sanitize changed
    evaluate(loaded, 0 if told else sum(map(model.checkpoint.num_bytes, target_names(model))), progress)
    return loaded


def load_shapes(model: OpenedModel, dtype_name: str) -> Any:
    """The same names, shapes and types from headers alone. Its arrays are never to be evaluated."""
    return _load(model, dtype_name, None)


def loading_bytes(model: OpenedModel, dtype_name: str) -> int:
    """What loading the target model takes beside it, at most."""
    checkpoint, names = model.checkpoint, target_names(model)
    if _is_mlx_lms(model):
        return source_bytes(checkpoint, names, _dtype(model, dtype_name))
    return slab_bytes(checkpoint, names)


def _load(model: OpenedModel, dtype_name: str, progress: Progress | None) -> Any:
    """``progress`` None: no weight is read."""
    dtype = _dtype(model, dtype_name)
    if model.path.is_dir() and model.spec.architecture != "other":
        check_types(model.checkpoint, target_names(model))
    if _is_mlx_lms(model):
        loaded = _from_folder(model)
    elif model.path.is_dir():
        loaded = _from_packed_folder(model, unpacked_dtype(model, dtype_name), progress)
    else:
        loaded = _from_gguf(model, unpacked_dtype(model, dtype_name), progress)
    if dtype is not None:
        loaded.set_dtype(dtype)
    return loaded


def unpacked_dtype(model: OpenedModel, dtype_name: str) -> mx.Dtype:
    """Of what is not packed in a file that we repack, scales included."""
    return _dtype(model, dtype_name) or (mx.bfloat16 if model.path.is_dir() else mx.float16)


def _is_mlx_lms(model: OpenedModel) -> bool:
    """Whether mlx-lm reads the target model's tensors, and not we."""
    known = model.spec.architecture != "other"
    return model.path.is_dir() and not (known and is_packed(model.checkpoint, target_names(model)))


def _dtype(model: OpenedModel, name: str) -> mx.Dtype | None:
    """None: as it is in the files."""
    if name == "auto":
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        # A GGUF's scales are float16; only a GPU computes faster with them than with float32. Experts in 16 bits are
        # multiplied by a GPU alone.
        as_stored = on_gpu or (model.path.is_dir() and model.spec.architecture != "qwen3_5_moe")
        return None if as_stored else mx.float32
    if name not in DTYPES:
        raise ConfigError(f"on MLX, dtype is auto or one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def _from_folder(model: OpenedModel) -> Any:
    folder, classes = model.path, partial(_classes, model.spec)
    try:
        return load_model(folder, lazy=True, model_config=_changes(model), get_model_classes=classes)[0]
    except (ValueError, FileNotFoundError, KeyError, TypeError) as error:
        if model.spec.architecture != "other":
            check_readable(model.checkpoint, target_names(model))
        raise UnknownModel(f"{folder}: mlx-lm cannot load this model: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """On one line, without the end of long lists."""
    return shorten(str(error) or type(error).__name__, 400, placeholder=" ...")


def _made_for_folder(model: OpenedModel) -> Any:
    """The model of a folder, with weights that are not the folder's yet."""
    config = load_config(model.path)
    config |= _changes(model)
    config.pop("quantization_config", None)
    model_class, args_class = _classes(model.spec, config)
    args: Any = args_class
    return model_class(args.from_dict(config))


def _from_packed_folder(model: OpenedModel, dtype: mx.Dtype, progress: Progress | None) -> Any:
    loaded, rules = _made_for_folder(model), folder_rules(model.checkpoint, dtype)
    weights = loaded.sanitize(dict(parameters(model.checkpoint, target_names(model), rules, progress)))
    weights = without_empty_biases(loaded, weights)
    quantise_like(loaded, weights)
    try:
        loaded.load_weights(list(weights.items()))
    except ValueError as error:
        raise UnknownModel(f"{model.path}: {_sentence(error)}") from error
    loaded.eval()
    return loaded


def without_empty_biases(module: nn.Module, weights: Tensors) -> Tensors:
    """Tools for GPTQ write a bias of zeros for every matrix, also of models that have none."""
    known = {name for name, _ in tree_flatten(module.parameters())}
    return {
        name: array
        for name, array in weights.items()
        if name in known or not name.endswith(".bias") or bool(array.any())
    }


def _changes(model: OpenedModel) -> dict[str, Any]:
    """Newer keys of config.json, under the names that every model class of mlx-lm reads."""
    config = load_config(model.path)
    if model.spec.architecture != "other" and (unread := _unread_of_yarn(config)):
        raise UnknownModel(f"{model.path}: mlx-lm does not read {unread} of YaRN; take --runner torch.")
    changes: dict[str, Any] = {}
    kind = config["model_type"]
    if kind == "qwen3_next" and model.spec.architecture != "other":
        return _as_qwen3_5(config) | _interval(config)
    if kind.endswith("_text") and find_spec(f"mlx_lm.models.{kind}") is None:
        changes["model_type"] = kind.removesuffix("_text")
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope and "rope_theta" not in config:
        changes["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            changes["rope_scaling"] = rope
    if "partial_rotary_factor" in rope:
        changes.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    return changes | _interval(config)


def _unread_of_yarn(config: dict[str, Any]) -> str:
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "yarn" not in (rope.get("type"), rope.get("rope_type")):
        return ""
    plain = {"attention_factor": None, "truncate": True}
    return " and ".join(key for key, value in plain.items() if rope.get(key) not in (None, value))


def _as_qwen3_5(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-Next's keys under Qwen3.5's names: the layers are the same once their joined projections are apart."""
    rope = {key: config.get(key, default) for key, default in NEXT_ROPE.items()}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {"type": "default"}
    return {"model_type": "qwen3_5_moe", "rope_parameters": rope}


def _interval(config: dict[str, Any]) -> dict[str, Any]:
    """Hybrid models: mlx-lm asks how often a layer is full attention, newer files name the kind of each layer."""
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or []
    if "full_attention_interval" in text or "linear_attention" not in kinds:
        return {}
    named = {"full_attention_interval": kinds.index("full_attention") + 1}
    return {"text_config": text | named} if "text_config" in config else named


def _classes(spec: ModelSpec, config: dict[str, Any]) -> tuple[type, type]:
    """The model's classes, changed to stack experts, to take joined projections apart, and to leave the head's tensors
    alone: heads.py loads them."""
    model_class, args_class = get_classes(config)

    class Target(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Tensors) -> Tensors:
            kept = {name: weight for name, weight in weights.items() if name_in_head(name, spec.head) is None}
            made: Tensors = super().sanitize(kept) if hasattr(model_class, "sanitize") else kept
            if any(name.endswith("_scale_inv") for name in made):  # bytes would become weights
                raise ValueError(
                    "its matrices are in FP8, which mlx-lm does not read for this architecture: use the model in BF16 "
                    "or converted to MLX."
                )
            return stack_experts(made if spec.gdn is None else _with_parts(made, spec.gdn))

    return Target, args_class


def _with_parts(weights: Tensors, gdn: GdnSpec) -> Tensors:
    """Rows of joined projections as matrices of their own, packed or not."""
    apart = dict(weights)
    for name, part in parts_of_joined(weights, gdn).items():
        rows = mx.array(part.rows())
        for kind in ("weight", "scales", "biases"):
            if (source := part.source.removesuffix("weight") + kind) in weights:
                apart[name.removesuffix("weight") + kind] = weights[source][rows]
                apart.pop(source, None)
    return apart


def name_in_head(name: str, head: HeadSpec) -> str | None:
    """The name of a tensor within the head; None: it belongs to the target model."""
    for wrapper in ("", "model.", "language_model.", "model.language_model.", "language_model.model."):
        if name.startswith(wrapper + head.prefix):
            return name.removeprefix(wrapper + head.prefix)
    return None


def stack_experts(weights: Tensors) -> Tensors:
    """Experts stored apart, one tensor each, -> one array for all of them, as mlx-lm's layers hold them.

    mlx-lm's ``sanitize`` does that for some architectures only. Quantized experts are stacked as they are.
    """
    stacked = dict(weights)
    for match in [found for name in weights if (found := FIRST_EXPERT.fullmatch(name))]:
        mlp, part = match["mlp"], match["part"]
        each: list[mx.array] = []
        while (name := f"{mlp}.experts.{len(each)}.{part}") in stacked:
            each.append(stacked.pop(name))
        stacked[f"{mlp}.switch_mlp.{part}"] = mx.stack(each)
    return stacked


def _from_gguf(model: OpenedModel, dtype: mx.Dtype, progress: Progress | None) -> Any:
    loaded, rules = _gguf_model(model.spec), gguf_rules(model.checkpoint, dtype)
    outer = "language_model." if model.spec.gdn is not None else ""
    made = parameters(model.checkpoint, target_names(model), rules, progress)
    weights = {outer + name: array for name, array in made}
    quantise_like(loaded, weights)
    loaded.load_weights(list(weights.items()))
    loaded.eval()
    return loaded


def target_names(model: OpenedModel) -> list[str]:
    """The tensors that the target model computes with."""
    unused = {"lm_head.weight"} if model.spec.tied else set()
    return [name for name in model.checkpoint.names() if not model.spec.head.owns(name) and name not in unused]


def _gguf_model(spec: ModelSpec) -> Any:
    modules = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}
    arch: Any = modules[spec.architecture]
    config = _config(spec) if spec.gdn is None else _config(spec) | _hybrid_config(spec)
    return arch.Model(arch.ModelArgs.from_dict(config))


def _hybrid_config(spec: ModelSpec) -> dict[str, Any]:
    assert spec.gdn is not None
    interval = (*spec.layer_kinds, "full_attention").index("full_attention") + 1
    if any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(spec.layer_kinds)):
        raise UnknownModel(
            f"{spec.name}: its attention layers do not come at regular intervals, as mlx-lm's do; take --runner torch."
        )
    gdn, moe, part = spec.gdn, spec.moe, spec.rope.rotary_dim / spec.head_dim
    experts = (
        {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "moe_intermediate_size": moe.expert_size,
            "shared_expert_intermediate_size": moe.shared_size,
        }
        if moe is not None
        else {}
    )
    return {
        "linear_num_key_heads": gdn.num_k_heads,
        "linear_num_value_heads": gdn.num_v_heads,
        "linear_key_head_dim": gdn.k_dim,
        "linear_value_head_dim": gdn.v_dim,
        "linear_conv_kernel_dim": gdn.conv_kernel,
        "full_attention_interval": interval,
        "rope_parameters": {
            "rope_theta": spec.rope.theta,
            "partial_rotary_factor": part,
            **(_scaling(spec.rope) or {"type": "default"}),
        },
        **experts,
    }


def quantise_like(module: nn.Module, weights: Tensors) -> None:
    """Makes packed layers of those whose weights are packed, each with its own bits and group size."""

    def packed(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return False
        found: dict[str, Any] = infer_quant_config(path, layer, weights)
        return found

    nn.quantize(module, class_predicate=packed)


def _config(spec: ModelSpec) -> dict[str, Any]:
    """config.json as mlx-lm would read it."""
    return {
        "model_type": spec.architecture,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rope_theta": spec.rope.theta,
        "rope_scaling": _scaling(spec.rope),
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.o_bias,
    }


def _scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.yarn is not None:
        return {
            "type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_context,
            "beta_fast": rope.yarn.fast_turns,
            "beta_slow": rope.yarn.slow_turns,
        }
    if rope.llama3_factor is None:
        return None
    return {
        "type": "llama3",
        "factor": rope.llama3_factor,
        "low_freq_factor": rope.llama3_low_freq,
        "high_freq_factor": rope.llama3_high_freq,
        "original_max_position_embeddings": rope.llama3_original_context,
    }
