"""Models of mlx-lm whose head we do not know: batched through our scheduler, equal to mlx-lm's own single stream.

And mixtures of experts, whose experts lie in one tensor or apart: the same tokens from both layouts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
import tiny
import tiny_fp8
import torch
from conversations import cold, play
from harness import Ask, Traffic
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.bitlinear_layers import bitnet_quantize
from mlx_lm.utils import _get_classes as get_classes
from mlx_lm.utils import load_model
from mlx_tiny import open_mlx, packed
from safetensors.torch import load_file, save_file

from slipstream.config import EngineConfig
from slipstream.errors import UnknownModel
from slipstream.load import open_model
from slipstream.runners.mlx.loaders.models import load_target
from slipstream.sampling import SamplingParams

VOCAB = 97
ENGINE = EngineConfig(max_streams=4, max_step_tokens=24, min_chunk=4, block_size=8)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"model_type": "phi3", "original_max_position_embeddings": 256},
    "mistral": {
        "model_type": "ministral3",
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    # A recurrence of another kind, which we keep as mlx-lm hands it to us.
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 4,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "max_position_embeddings": 256,
    },
}


def save(name: str, folder: Path) -> Path:
    """Random weights of a shape."""
    config = {**SIZES, **CONFIGS[name]}
    model_class, args_class = get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    weights = {
        key: mx.random.normal(weight.shape) * weight.shape[-1] ** -0.5 if weight.ndim == 2 else weight
        for key, weight in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def single_stream(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    model, _ = load_model(folder)
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens)]


def some_requests() -> list[Ask]:
    chance = random.Random(1)
    return [
        Ask(
            tuple(chance.randrange(VOCAB) for _ in range(chance.randrange(1, 30))),
            SamplingParams(temperature=0.0, max_tokens=chance.randrange(4, 24), seed=i),
            arrival=chance.randrange(6),
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_mlx_lms_single_stream(tmp_path: Path, name: str) -> None:
    folder, asks = save(name, tmp_path), some_requests()
    runner = open_mlx(folder)
    assert runner.info.max_depth == 0
    assert "no MTP head" in runner.info.why_no_draft
    assert runner.info.prompts_apart
    outputs = Traffic(runner, ENGINE).run(asks)
    for ask, got in zip(asks, outputs, strict=True):
        assert ask.params.max_tokens is not None
        assert got == single_stream(folder, ask.prompt, ask.params.max_tokens)


@pytest.mark.parametrize("name", ["gemma3", "mamba2"])
def test_the_prefix_cache_changes_no_token(tmp_path: Path, name: str) -> None:
    """Windows, and a recurrence whose rows are fed in pieces to have their states."""
    runner = open_mlx(save(name, tmp_path))
    total = 0
    for seed in range(3):
        played = play(runner, seed)
        total += played.num_cached
        for asked in played.asked:
            tokens, _ = cold(runner, asked.request)
            assert asked.final is not None
            assert asked.tokens == (tokens[: len(asked.tokens)] if asked.final.finish_reason == "abort" else tokens)
    assert total > 300


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    save("phi3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no_such_thing"}))
    with pytest.raises(UnknownModel, match="no_such_thing"):
        open_mlx(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_moe"])
def test_fp8_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    folder = tiny_fp8.save(tiny_fp8.build(kind), tmp_path)
    with pytest.raises(UnknownModel, match=r"is stored in FP8, which is not read on MLX: use --runner torch, or"):
        open_mlx(folder)


def test_fp8_of_other_architectures_is_refused_without_naming_a_runner(tmp_path: Path) -> None:
    """None of ours knows them."""
    folder = save("phi3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnknownModel, match=r"in FP8, which mlx-lm does not read for this architecture: use the model in"
    ):
        open_mlx(folder)


def test_what_only_mlx_lm_reads_is_left_to_it(tmp_path: Path) -> None:
    """BitNet's layout, of a Llama: no reader of ours knows it."""
    folder = tiny.save(tiny.build("llama-mha-untied"), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "bitnet"}}
    model = bitnet_quantize(load_model(folder)[0], config["quantization_config"])
    weights = dict(tree_flatten(model.parameters()))
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint8
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_target(open_model(str(folder), any_architecture=True), "auto")
    assert dict(tree_flatten(loaded.parameters())).keys() == weights.keys()


def apart(folder: Path, target: Path) -> Path:
    """The same folder with each expert's tensors under names of their own, also where they are quantized."""
    target.mkdir()
    weights = tiny.experts_apart(load_file(folder / "model.safetensors"))
    for name in [name for name in weights if ".switch_mlp." in name]:
        for expert, weight in enumerate(weights.pop(name)):
            weights[name.replace(".switch_mlp.", f".experts.{expert}.")] = weight.contiguous()
    save_file(weights, target / "model.safetensors", {"format": "mlx"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize("bits", [None, 4])
def test_experts_in_one_tensor_and_apart_give_the_same_tokens(tmp_path: Path, bits: int | None) -> None:
    """Of the target model and of its head."""
    stacked = tiny.save(tiny.build("qwen3_5_moe"), tmp_path / "raw", head=True)
    if bits is not None:
        stacked = packed(stacked, tmp_path / "packed", bits)
    outputs = []
    for folder in (stacked, apart(stacked, tmp_path / "apart")):
        runner = open_mlx(folder)
        assert runner.info.max_depth > 0
        outputs.append(Traffic(runner, ENGINE).run(some_requests()))
    assert outputs[0] == outputs[1]


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    stacked = tiny.save(tiny.build("qwen3_5_moe"), tmp_path / "raw", head=True)
    folder = apart(stacked, tmp_path / "apart")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnknownModel, match=r"layers\.2\.mlp"):
        open_mlx(folder)
