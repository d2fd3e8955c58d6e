"""Hugging Face folders: tiny models saved by transformers, every architecture, and the configurations we refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers

from slipstream.errors import CorruptFile, LoadError, MissingTensor, UnknownModel
from slipstream.load.hf.config import spec_from_config
from slipstream.load.hf.folder import open_hf
from slipstream.load.shapes import separate_experts
from slipstream.load.spec import GdnSpec, MoeSpec

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 5,
}
DENSE = {**COMMON, "intermediate_size": 48}
LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**DENSE, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DENSE, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**DENSE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DENSE, "head_dim": 16}),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DENSE | LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", COMMON | LINEAR | MOE),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """model type -> (folder, the transformers model saved there)."""
    models = {}
    for kind, (model_class, config_class, options) in MODELS.items():
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        models[kind] = folder, model
    return models


@pytest.mark.parametrize("kind", MODELS)
def test_opens_what_transformers_saved(saved, kind):
    folder, model = saved[kind]
    checkpoint = open_hf(folder)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if checkpoint.spec.tied:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        if "mlp.experts." in name:
            continue  # saved expert by expert: the next test
        raw = checkpoint.get(name)
        assert raw.shape == checkpoint.shape(name) == tensor.shape
        assert checkpoint.num_bytes(name) == tensor.nbytes
        np.testing.assert_array_equal(raw.data, tensor)


def test_experts_saved_one_by_one(saved):
    folder, model = saved["qwen3_5_moe"]
    checkpoint = open_hf(folder)
    assert separate_experts(checkpoint, "model.layers.0.")
    fused = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].numpy()
    np.testing.assert_array_equal(checkpoint.get("model.layers.0.mlp.experts.3.up_proj.weight").data, fused[3, 16:])


@pytest.mark.parametrize("kind", MODELS)
def test_spec_agrees_with_transformers(saved, kind):
    folder, model = saved[kind]
    spec, config = open_hf(folder).spec, model.config
    assert spec.architecture == ("llama" if kind == "mistral" else kind)
    assert spec.name == folder.name
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (32, 4, 64)
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 8)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.max_context == config.max_position_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.tied == config.tie_word_embeddings
    assert spec.eos_token_ids == (5,)
    attention = model.model.layers[3].self_attn
    assert spec.qkv_bias == (attention.q_proj.bias is not None)
    assert spec.o_bias == (attention.o_proj.bias is not None)


def test_hybrid_fields(saved):
    spec = open_hf(saved["qwen3_5"][0]).spec
    assert spec.layer_kinds == ("linear_attention",) * 3 + ("full_attention",)
    assert spec.gdn == GdnSpec(num_k_heads=2, num_v_heads=4, k_dim=8, v_dim=6, conv_kernel=4)
    assert spec.rope.rotary_dim == 4
    assert spec.qk_norm
    assert spec.gated_attention
    assert spec.norm_plus_one
    assert spec.moe is None
    moe = open_hf(saved["qwen3_5_moe"][0]).spec
    assert moe.moe == MoeSpec(num_experts=4, num_active=2, expert_size=16, shared_size=24)
    assert moe.intermediate_size == 0


def test_multimodal_folder(tmp_path, saved):
    source, model = saved["qwen3_5"]
    text = json.loads((source / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text | {"mtp_num_hidden_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    state = {n.replace("model.", "model.language_model.", 1): t.numpy() for n, t in model.state_dict().items()}
    state |= {"model.visual.patch.weight": np.ones(3, np.float32), "mtp.norm.weight": np.ones(32, np.float32)}
    from safetensors.numpy import save_file

    save_file(state, tmp_path / "model.safetensors")
    checkpoint = open_hf(tmp_path)
    assert "model.layers.0.linear_attn.A_log" in checkpoint
    assert "mtp.norm.weight" in checkpoint
    assert not any("visual" in name or "language_model" in name for name in checkpoint.names())
    assert checkpoint.spec.tied
    assert checkpoint.spec.head.num_declared_layers == 1
    assert checkpoint.spec.eos_token_ids == (7, 8)
    assert checkpoint.get("model.norm.weight").name == "model.norm.weight"


def spec(config, **changes):
    return spec_from_config(config | changes, {}, "config.json")


def test_both_spellings_of_rope(build):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = spec(build.config, rope_theta=5e5, rope_scaling=llama3 | {"type": "llama3"})
    new = spec(build.config, rope_theta=None, rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 5e5})
    assert old.rope == new.rope
    assert old.rope.llama3_factor == 8.0
    assert old.rope.llama3_original_context == 64
    assert spec(build.config).rope.llama3_factor is None
    assert spec(build.config, partial_rotary_factor=0.5).rope.rotary_dim == 8


def test_hybrid_rotates_a_quarter_by_default(build):
    assert spec(build.config, model_type="qwen3_5_text", head_dim=64).rope.rotary_dim == 16
    assert spec(build.config, model_type="qwen3", head_dim=64).rope.rotary_dim == 64


def test_full_attention_interval(build):
    kinds = spec(build.config | MOE, model_type="qwen3_5_moe_text", num_hidden_layers=6, full_attention_interval=3)
    assert kinds.layer_kinds == ("linear_attention", "linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma"}, "'gemma' is not one of"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs by layer"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 64}, "sliding-window"),
        ({"model_type": "qwen3_5_text", "layer_types": ["mamba"]}, "'mamba'"),
        ({"layer_types": ["linear_attention"]}, "'linear_attention'"),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "output gate"),
    ],
)
def test_refuses_what_we_would_compute_wrongly(build, changes, says):
    with pytest.raises(UnknownModel, match=says):
        spec(build.config, **changes)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_window_as_long_as_the_context_is_none(build, kind):
    assert spec(build.config, model_type=kind, sliding_window=128, use_sliding_window=True, max_window_layers=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "'hidden_size'"),
        ({"model_type": None}, "'model_type'"),
        ({"num_attention_heads": 3}, "3 attention heads"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_size": "64"}, "hidden_size should be"),
        ({"num_hidden_layers": 10**9}, "at most"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"text_config": 3}, "text_config"),
        ({"partial_rotary_factor": 3.0}, "rotary"),
    ],
)
def test_broken_configurations(build, changes, says):
    with pytest.raises(LoadError, match=says):
        spec(build.config, **changes)


def test_missing_and_misshapen_tensors(tmp_path, build):
    build.llama_folder(tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(MissingTensor, match=r"'lm_head\.weight' is missing"):
        open_hf(tmp_path / "untied")
    build.llama_folder(tmp_path / "wide", intermediate_size=100)
    with pytest.raises(MissingTensor, match=r"\[96, 64\], this model needs \[100, 64\]"):
        open_hf(tmp_path / "wide")


def test_same_tensor_under_two_names(tmp_path, build):
    build.llama_folder(tmp_path, extra={"model.language_model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(CorruptFile, match="same tensor twice"):
        open_hf(tmp_path)


def test_not_a_model_folder(tmp_path):
    with pytest.raises(LoadError, match=r"config\.json does not exist"):
        open_hf(tmp_path)
    with pytest.raises(LoadError, match="not a folder"):
        open_hf(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{nope")
    with pytest.raises(CorruptFile, match="should be JSON"):
        open_hf(tmp_path)
