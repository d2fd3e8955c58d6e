"""Qwen3-Next's folders on MLX: `transformers`' logits, mlx-lm's own on what it converted, and drafts with the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from harness import Ask, Traffic, alone, open_runner
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from slipstream.config import EngineConfig
from slipstream.load import open_model
from slipstream.sampling import SamplingParams

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model, quantize_model
from mlx_tiny import open_mlx

from slipstream.runners.mlx.loaders.models import load_target

TOKENS = torch.randint(0, tiny.VOCAB, (30,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, seed=1, draft=3)
ASKS = [Ask(tuple(TOKENS[:20]), GREEDY), Ask(tuple(TOKENS[20:27]), GREEDY, arrival=3)]
EARLY_NAMES = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "full_attention_interval": 4}


def build(**more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny.randomise(tiny.next_moe(shared_expert_intermediate_size=64, **more))


def save(model: PreTrainedModel, folder: Path, *, apart: bool = False) -> Path:
    tiny.save(model, folder, head=True)
    if apart:
        tensors = load_file(folder / "model.safetensors")
        save_file(tiny.experts_apart(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def expected(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    assert logits.std() > 0.3, "logits so flat that anything would agree"
    return logits


def ours(folder: Path) -> torch.Tensor:
    loaded = load_target(open_model(str(folder), any_architecture=True), "float32")
    return torch.tensor(loaded(mx.array([TOKENS]))[0].tolist())


def with_early_names(folder: Path) -> None:
    """config.json as it was published first."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["layer_types"]
    path.write_text(json.dumps(config | EARLY_NAMES))


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
def test_a_raw_folder(tmp_path: Path, apart: bool) -> None:
    """And the tokens and drafts of the PyTorch runner."""
    model = build()
    folder = save(model, tmp_path, apart=apart)
    torch.testing.assert_close(ours(folder), expected(model), atol=2e-4, rtol=0)
    traffic, theirs = Traffic(open_mlx(folder), EngineConfig(max_streams=4)), open_runner(folder, head=True)
    assert traffic.run(ASKS) == [alone(theirs, ask) for ask in ASKS]
    other = Traffic(theirs, EngineConfig(max_streams=4))
    other.run(ASKS)
    drafts = [(each.snapshot.num_draft_tokens, each.snapshot.num_accepted_tokens) for each in (traffic, other)]
    assert drafts[0] == drafts[1]
    assert drafts[0][0] > 0


def test_early_configurations(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    model = build(rope_parameters=rope)
    folder = save(model, tmp_path)
    with_early_names(folder)
    torch.testing.assert_close(ours(folder), expected(model), atol=2e-4, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_mlx_lm_converted(tmp_path: Path, bits: int) -> None:
    """It drops the head, so that one is given in a file of its own."""
    model = build()
    raw, folder = save(model, tmp_path / "raw", apart=True), tmp_path / "converted"
    with_early_names(raw)
    theirs, config = quantize_model(load_model(raw)[0], load_config(raw), 32, bits)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(theirs.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny.head_tensors(model), tmp_path / "head.safetensors")
    assert "model.layers.0.linear_attn.in_proj_qkvz.scales" in load_file(folder / "model.safetensors")
    logits = torch.tensor(theirs(mx.array([TOKENS]))[0].tolist())
    torch.testing.assert_close(ours(folder), logits, atol=1e-4, rtol=0)
    runner = open_mlx(folder, mtp=tmp_path / "head.safetensors")
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    assert traffic.run(ASKS) == [alone(runner, ask) for ask in ASKS]
    assert traffic.snapshot.num_draft_tokens > 0


def test_layers_without_experts_are_left_to_mlx_lm(tmp_path: Path) -> None:
    """As no published model has them: it runs, without drafts."""
    model = build(mlp_only_layers=[1])
    folder = save(model, tmp_path, apart=True)
    with_early_names(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}))
    torch.testing.assert_close(ours(folder), expected(model), atol=2e-4, rtol=0)
    assert open_mlx(folder).info.max_depth == 0
