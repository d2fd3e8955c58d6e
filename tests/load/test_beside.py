"""Tensors beside those that a folder's model reads: what changes its results is refused, what does not is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_packed
import torch

from slipstream.errors import HeadError, UnknownModel
from slipstream.load import open_model
from slipstream.load.head import find_head, open_head
from slipstream.load.hf.folder import open_hf

LAYER = "model.layers.0."
ATTENTION = f"{LAYER}self_attn."

# As published folders have them: of activations and of KV caches, of quantisers, of other modules.
HARMLESS = [
    *(f"{ATTENTION}o_proj.{of}_{what}" for of in ("input", "output") for what in ("scale", "global_scale")),
    *(f"{ATTENTION}o_proj.{name}" for name in ("input_zero_point", "output_zero_point", "input_scale_ub")),
    *(f"{ATTENTION}o_proj.{name}" for name in ("activation_scale", "g_idx", "weight_g_idx")),
    *(f"{ATTENTION}{which}_{what}" for which in "kvq" for what in ("scale", "zero_point", "global_scale")),
    *(f"{ATTENTION}{place}_scale" for place in ("k_proj.k", "v_proj.v", "k_proj.output", "attn.k", "attn.v", "kv")),
    *(f"{ATTENTION}{name}" for name in ("k_proj.k_bias", "v_proj.v_bias", "attn.prob_scale", "kv_cache.k_scale")),
    *(f"{ATTENTION}o_proj.{which}_quantizer._amax" for which in ("input", "weight")),
    *(f"{ATTENTION}{name}" for name in ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")),
    *(f"{ATTENTION}{which}_bmm_quantizer.{what}" for which in "kv" for what in ("_amax", "_scale", "_bias_value")),
    *("model.rotary_emb.inv_freq", "model.embed_positions", "model.layers.7.self_attn.q_proj.weight"),
    *("model.layers.7.self_attn.q_proj.bias", "mtp.norm.bias", "lm_head.bias"),  # this model reads no such modules
    *("visual.blocks.0.attn.qkv.bias", "model.visual.merger.norm.bias", "audio_tower.layers.0.fc1.bias"),
    *("vision_tower.patch.bias", "multi_modal_projector.linear_1.bias", "visual.layers.0.adapter.weight"),
    *("model.layers.7.adapter.down.weight", "vision_tower.encoder.layers.0.some_gate.weight", "score.weight"),
    *("mtp.layers.0.adapter.down.weight", "lm_head.weight"),  # of no head here; the output is the embedding
]


@pytest.mark.parametrize("name", HARMLESS)
def test_left_out(tmp_path: Path, build: Any, name: str) -> None:
    open_hf(build.llama_folder(tmp_path, extra={name: np.full(3, 0.37, np.float32)}))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_what_changes_nothing(tmp_path: Path, build: Any, dtype: str) -> None:
    """AutoGPTQ writes a bias of zeros for every matrix; smoothing that was folded leaves factors of one."""
    ones = {"F32": np.ones(64, "<f4"), "F16": np.ones(64, "<f2"), "BF16": np.full(64, 0x3F80, "<u2")}[dtype]
    tensors = {name: ("F32", array) for name, array in build.llama_tensors().items()}
    tensors |= {f"{ATTENTION}o_proj.pre_quant_scale": (dtype, ones), "model.norm.bias": (dtype, ones * 0)}
    tensors |= {f"{LAYER}{part}.bias": (dtype, ones * 0) for part in ("mlp.down_proj", "self_attn.q_proj")}
    build.llama_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(build.safetensors_bytes(tensors))
    open_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("self_attn.o_proj.bias", "is a bias, which this model does not have by its config.json: take the folder"),
        ("input_layernorm.bias", "is a bias"),
        (
            "self_attn.o_proj.pre_quant_scale",
            "factors for the inputs of a matrix, .*: take the model quantised without",
        ),
        ("mlp.up_proj.input_quantizer._pre_quant_scale", "factors for the inputs"),
        ("mlp.up_proj.lora_A.weight", "part of an adapter, which is not computed: merge it .* and take that folder"),
        ("mlp.up_proj.lora_magnitude_vector.default.weight", "part of an adapter"),
        ("mlp.up_proj.svdquant_lora_a", "would change what"),
        ("mlp.up_proj.R1.weight", r"would change what model\.layers\.0\.mlp\.up_proj computes, but .*: take the model"),
        ("mlp.up_proj.weight_mask", "would change what"),
        (
            "self_attn.some_gate.weight",
            "is of a module that this model does not have by its .*: take a model without it",
        ),
        ("self_attn.sinks", "is of a module"),
        ("adapter.down.weight", "is of a module"),
        ("layer_scalar", "is of a module"),
        ("post_feedforward_layernorm.bias", "is a bias"),
        ("adapter.lora_A.weight", "part of an adapter"),
    ],
)
@pytest.mark.parametrize("outer", ["model.", "model.language_model."])
def test_refused(tmp_path: Path, build: Any, name: str, says: str, outer: str) -> None:
    """By the name that it has in the file."""
    tensors = build.llama_tensors() | {f"{LAYER}{name}": np.array([0, 0.5], np.float32)}
    named = {key.replace("model.", outer, 1): ("F32", array) for key, array in tensors.items()}
    build.llama_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(build.safetensors_bytes(named))
    with pytest.raises(UnknownModel, match=says) as raised:
        open_hf(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: {outer}layers.0.{name} ")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("cyankiwi-stacked", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("cyankiwi-stacked", "model.layers.0.mlp.experts.down_proj.pre_quant_scale"),
        ("quanttrio-awq", "model.layers.0.mlp.experts.3.up_proj.bias"),
        ("quanttrio-awq", "model.layers.0.mlp.gate.e_score_correction_bias"),
        ("sakamakismile-nvfp4", "model.layers.0.linear_attn.out_proj.pre_quant_scale"),
        ("sakamakismile-nvfp4", "model.layers.0.linear_attn.conv1d.bias"),
        ("sakamakismile-nvfp4", "lm_head.bias"),
        ("next-gptq", "model.layers.0.linear_attn.in_proj_qkvz.bias"),
        ("next-gptq", "model.layers.0.linear_attn.in_proj_gate.weight"),
        ("cyankiwi-stacked", "model.layers.0.mlp.experts_norm.weight"),
    ],
)
def test_refused_in_published_layouts(tmp_path: Path, layout: str, name: str) -> None:
    made = replace(tiny_packed.LAYOUTS[layout], more={name: torch.full((4,), 0.5)})
    tiny_packed.save(made, tmp_path)
    with pytest.raises(UnknownModel, match=name.rpartition(".")[2]):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["self_attn.some_gate.weight", "adapter.down.weight"])
def test_in_a_heads_layer(tmp_path: Path, name: str) -> None:
    more = {f"mtp.layers.0.{name}": torch.full((64,), 0.5)}
    tiny_packed.save(replace(tiny_packed.LAYOUTS["int8"], more=more), tmp_path)
    model = open_model(str(tmp_path))
    assert model.head is None
    assert f"mtp.layers.0.{name} is of a module that" in model.head_reason


def test_beside_a_heads_matrix(tmp_path: Path) -> None:
    """A head that would draft badly is left out, and an error where it was given."""
    name = "mtp.layers.0.self_attn.q_proj.pre_quant_scale"
    tiny_packed.save(replace(tiny_packed.LAYOUTS["int8"], more={name: torch.full((64,), 0.5)}), tmp_path)
    model = open_model(str(tmp_path))
    assert model.head is None
    assert model.head_reason.startswith(f"no MTP head: {tmp_path}: {name} has factors")
    with pytest.raises(UnknownModel, match="factors for the inputs"):
        open_head(tmp_path / "model.safetensors", model.spec)
    with pytest.raises(HeadError, match=r"The MTP head that was given cannot be used: .*factors for the inputs"):
        find_head(model.checkpoint, tmp_path)
