"""Tiny folders in the layouts of published quantised ones: names, types, files, and configurations that lie.

Which tensors a layout quantises is a list of (pattern, packer), the first that fits; None: bfloat16.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import packing
import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

GROUP = 32
Rules = Sequence[tuple[str, str | None]]
ALL = r"_proj(_\w+)?(\.weight)?$|lm_head"
SMALL = r"in_proj_(a|b|ba)\.|mlp\.gate\.|shared_expert_gate|embed_tokens|mtp\.fc"
# Wide enough for groups and blocks; the shared expert of tiny.py has 48 columns.
WIDE = {"shared_expert_intermediate_size": 64}
MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "dense": tiny.hybrid,
    "moe": lambda **more: tiny.moe(**WIDE, **more),
    "next": lambda **more: tiny.next_moe(**WIDE, **more),
    "blocks": lambda **more: tiny.moe(
        **{"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **more}
    ),
    "qwen2": lambda: tiny.MODELS["qwen2"](),
}


@dataclass(frozen=True)
class Layout:
    model: str
    rules: Rules
    config: dict[str, Any]
    stacked: bool = False  # the target model's experts
    head_stacked: bool = False
    head_file: str | None = None  # a file of its own, which no index names
    has_head: bool = True
    multimodal: bool = False  # names and configuration one level deeper
    more: dict[str, Tensor] = field(default_factory=dict)


def _gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, **more}


def _compressed(form: str, ignore: list[str], **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ignore}


_SCALES = {f"model.layers.3.self_attn.{which}_scale": torch.tensor(0.5) for which in "kv"}
_AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}

LAYOUTS: dict[str, Layout] = {
    "qwen-gptq": Layout(
        "moe",
        [(r"^mtp|attn|shared_expert", None), (r"experts", "gptq")],
        _gptq(dynamic={"-:.*attn.*": {}, "-:.*mtp.*": {}, "-:.*shared_expert.*": {}, "lm_head": {}}),
        multimodal=True,
    ),
    "intel-autoround": Layout(
        "moe",
        [(SMALL + "|lm_head", None), (ALL, "autoround")],
        _AUTOROUND | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"},
        head_file="model_extra_tensors.safetensors",
        multimodal=True,
    ),
    "autoround-as-awq": Layout(
        "dense",
        [(SMALL + "|lm_head|^mtp", None), (ALL, "awq-symmetric")],
        _AUTOROUND | {"packing_format": "auto_round:auto_awq"},
        head_file="model_extra_tensors.safetensors",
    ),
    "gptq-that-claims-a-quantised-head": Layout(
        "dense", [(SMALL + "|lm_head|^mtp", None), (ALL, "gptq")], _gptq(dynamic={"+:.*mtp.*": {"bits": 4}})
    ),
    "gptq-act-order": Layout(
        "dense", [(SMALL + "|lm_head", None), (ALL, "gptq-act-order")], _gptq(desc_act=True, sym=False)
    ),
    "gptq-v2": Layout(
        "moe",
        [(SMALL + "|lm_head", None), (ALL, "gptq-v2")],
        _gptq(checkpoint_format="gptq_v2"),
        # AutoGPTQ writes such a bias for each matrix
        more={f"{layer}.self_attn.o_proj.bias": torch.zeros(64) for layer in ("model.layers.3", "mtp.layers.0")},
    ),
    "gptq-asymmetric": Layout("moe", [(SMALL + "|lm_head", None), (ALL, "gptq-asymmetric")], _gptq(sym=False)),
    "gptq-v2-asymmetric": Layout(
        "dense",
        [(SMALL + "|lm_head", None), (ALL, "gptq-v2-asymmetric")],
        _gptq(sym=False, checkpoint_format="gptq_v2"),
        multimodal=True,
    ),
    "gptq-8-bit": Layout("moe", [(SMALL + "|lm_head|^mtp", None), (ALL, "gptq-8-bit")], _gptq(bits=8)),
    "quanttrio-awq": Layout(
        "moe",
        [(SMALL + "|lm_head|^mtp", None), (ALL, "awq")],
        _AWQ | {"modules_to_not_convert": ["everything"]},
    ),
    "cyankiwi-stacked": Layout(
        "moe",
        [(r"mlp\.gate\.|shared_expert_gate|embed_tokens|lm_head|^mtp", None), (ALL, "pack-quantized")],
        _compressed("pack-quantized", ["lm_head"], type="int", strategy="group", group_size=GROUP, symmetric=True),
        stacked=True,
        head_stacked=True,
        multimodal=True,
    ),
    "cyankiwi-asymmetric": Layout(
        "moe",
        [(r"mlp\.gate\.|shared_expert_gate|embed_tokens|lm_head|^mtp", None), (ALL, "pack-quantized-asymmetric")],
        _compressed("pack-quantized", ["lm_head"], type="int", strategy="group", group_size=GROUP, symmetric=False),
        head_stacked=True,
    ),
    "redhat-nvfp4": Layout(
        "moe",
        [(SMALL + "|lm_head|^mtp|linear_attn", None), (ALL, "nvfp4-pack-quantized")],
        _compressed("nvfp4-pack-quantized", ["re:.*linear_attn.*"], type="float", strategy="tensor_group"),
        head_file="model_mtp.safetensors",
        multimodal=True,
    ),
    "sakamakismile-nvfp4": Layout(
        "dense",
        [("lm_head|embed_tokens", None), (ALL, "nvfp4-pack-quantized")],
        _compressed("nvfp4-pack-quantized", ["lm_head"], type="float", strategy="tensor_group"),
        has_head=False,
    ),
    "unsloth-nvfp4": Layout(
        "moe",
        [
            (SMALL + "|^mtp", None),
            ("self_attn|linear_attn|lm_head", "fp8-channel"),
            ("experts|shared_expert", "nvfp4-pack-quantized"),
        ],
        _compressed("mixed-precision", ["model.layers.0.linear_attn", "model.layers.3.self_attn"], type="float"),
    ),
    "nvidia-nvfp4": Layout(
        "moe",
        [
            (SMALL + "|^mtp", None),
            ("self_attn|linear_attn", "fp8-tensor"),
            ("experts|shared_expert|lm_head", "modelopt-nvfp4"),
        ],
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"]},
        head_stacked=True,
        multimodal=True,
        more=_SCALES,
    ),
    "experts-in-fp8-and-nvfp4": Layout(
        "blocks",
        [(SMALL + "|lm_head", None), (r"gate_proj|up_proj", "fp8-tensor"), (ALL, "modelopt-nvfp4")],
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    ),
    "experts-in-int4-and-fp8": Layout(
        "blocks",
        [(SMALL + "|lm_head|^mtp", None), ("down_proj", "fp8-channel"), (ALL, "pack-quantized")],
        _compressed("mixed-precision", ["lm_head"], type="int"),
        stacked=True,
    ),
    "experts-in-int4-and-bfloat16": Layout(
        "blocks",
        [(SMALL + "|lm_head|^mtp|down_proj", None), (ALL, "gptq")],
        _gptq(dynamic={"-:.*down_proj.*": {}}),
    ),
    "fp8-block-quantised-head": Layout(
        "dense",
        [(SMALL, None), (ALL, "fp8-block")],
        _compressed("float-quantized", ["re:.*mtp.*"], strategy="block"),
        multimodal=True,
    ),
    "fp8-static": Layout(
        "dense", [(SMALL + "|^mtp", None), (ALL, "fp8-tensor-static")], _compressed("float-quantized", [])
    ),
    "int8": Layout("dense", [(SMALL, None), (ALL, "int8-channel")], _compressed("int-quantized", [])),
    "int8-packed": Layout("dense", [(SMALL, None), (ALL, "pack-quantized-8-bit")], _compressed("pack-quantized", [])),
    "mxfp4": Layout("moe", [(SMALL, None), (ALL, "mxfp4-pack-quantized")], _compressed("mxfp4-pack-quantized", [])),
    "quantised-embedding": Layout("dense", [("mtp.fc", None), (ALL + "|embed", "pack-quantized")], {}),
    "qwen2-awq": Layout("qwen2", [("embed|lm_head|^mtp|bias", None), (ALL, "awq")], _AWQ),
    "next-gptq": Layout("next", [(SMALL + "|lm_head|^mtp", None), (ALL, "gptq")], _gptq()),
    "next-awq": Layout("next", [(SMALL + "|lm_head|^mtp", None), (ALL, "awq")], _AWQ),
    "next-fp8": Layout("next", [(SMALL + "|lm_head", None), (ALL, "fp8-block")], {"quant_method": "fp8"}),
    "next-nvfp4": Layout("next", [("mlp.gate|embed", None), (ALL, "nvfp4-pack-quantized")], {}),
}


def build(kind: str, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny.randomise(MODELS[kind](**more))


def save(layout: Layout, folder: Path, **more: object) -> PreTrainedModel:
    """The folder, target model and head; returns the model with the weights that the folder stands for.

    ``more``: sizes of the model
    """
    model = build(layout.model, **more)
    target, twin = _stored(model.state_dict(), layout, layout.stacked)
    head, _ = _stored(tiny.head_tensors(model), layout, layout.head_stacked) if layout.has_head else ({}, {})
    target |= layout.more
    if layout.multimodal:
        target = {re.sub("^model\\.", "model.language_model.", name): each for name, each in target.items()}
        target["model.visual.merger.weight"] = torch.zeros(4, 4)
    if layout.head_file:
        save_file(head, folder / layout.head_file)
        save_file(target, folder / "model-00001-of-00001.safetensors")
        weight_map = dict.fromkeys(target, "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file(target | head, folder / "model.safetensors")
    _save_config(model, layout, folder)
    model.load_state_dict(twin)
    return model


def _save_config(model: PreTrainedModel, layout: Layout, folder: Path) -> None:
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    text = json.loads(path.read_text()) | {"mtp_num_hidden_layers": 0 if layout.has_head else 1}
    outer = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text} if layout.multimodal else text
    path.write_text(json.dumps(outer | {"quantization_config": layout.config}))


def _stored(tensors: dict[str, Tensor], layout: Layout, stacked: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As the folder has them, and as the model does: what they stand for, in float32, with stacked experts."""
    stored: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        pieces = {name: weight} if stacked else tiny.experts_apart({name: weight})
        made = [_packed(piece, each, layout.rules) for piece, each in pieces.items()]
        for one, _ in made:
            stored |= one
        floats = [each for _, each in made]
        if len(floats) > 1:
            per_expert = len(floats) // weight.shape[0]
            rows = [torch.cat(floats[at : at + per_expert]) for at in range(0, len(floats), per_expert)]
            twin[name] = torch.stack(rows)
        else:
            twin[name] = floats[0]
    return stored, twin


def _packed(name: str, weight: Tensor, rules: Rules) -> tuple[dict[str, Tensor], Tensor]:
    kind = next((kind for pattern, kind in rules if re.search(pattern, name)), None)
    if kind is None or weight.ndim < 2 or "conv1d" in name or "norm" in name:
        kept = weight.to(torch.bfloat16).contiguous()
        return {name: kept}, kept.float()
    pack, base = packing.PACKERS[kind], name.removesuffix(".weight")
    if weight.ndim == 2:
        stored, floats = pack(weight, GROUP)
        return {f"{base}.{suffix}": each.contiguous() for suffix, each in stored.items()}, floats
    each = [pack(matrix, GROUP) for matrix in weight]
    shape = {"weight_shape": torch.tensor(weight.shape[1:])}
    joined = {suffix: torch.stack([one[suffix] for one, _ in each]) for suffix in each[0][0]} | shape
    return {f"{base}.{suffix}": tensor for suffix, tensor in joined.items()}, torch.stack([one for _, one in each])
