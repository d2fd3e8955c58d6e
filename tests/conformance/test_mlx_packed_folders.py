"""Folders that other tools quantised, on MLX: what its layouts hold is repacked and exact, the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_packed
import torch
from harness import Ask, Traffic, alone

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import UnknownModel
from slipstream.load import open_model
from slipstream.sampling import SamplingParams

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_tiny import open_mlx

from slipstream.runners.mlx.loaders.models import load_lazily
from slipstream.runners.mlx.loading import model_shape

TOKENS = torch.randint(0, tiny.VOCAB, (30,), generator=torch.Generator().manual_seed(3)).tolist()
REPACKED = ["qwen-gptq", "intel-autoround", "autoround-as-awq", "quanttrio-awq", "cyankiwi-stacked", "int8", "mxfp4"]
REPACKED += ["cyankiwi-asymmetric", "gptq-that-claims-a-quantised-head", "quantised-embedding", "int8-packed"]
REPACKED += ["gptq-asymmetric", "gptq-v2-asymmetric", "gptq-8-bit"]
REFUSED = {
    "gptq-act-order": "is stored in act-order, which is not read on MLX: use --runner torch",
    "redhat-nvfp4": "is stored in NVFP4, which is not read on MLX: use --runner torch",
    "nvidia-nvfp4": "is stored in NVFP4, which is not read on MLX: use --runner torch",
    "fp8-static": "mlx-lm cannot load this model",
}


@pytest.mark.parametrize("name", REPACKED)
def test_logits(tmp_path: Path, name: str) -> None:
    twin = tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    with torch.no_grad():
        expected = twin(torch.tensor([TOKENS])).logits[0]
    model = open_model(str(tmp_path), any_architecture=True)
    loaded = load_lazily(model, "float32")
    logits = torch.tensor(loaded(mx.array([TOKENS]))[0].tolist())
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    planned = model_shape(model, EngineConfig(), RunnerConfig(dtype="float32")).weights
    assert sum(planned.values()) == sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))


@pytest.mark.parametrize("name", ["intel-autoround", "cyankiwi-stacked", "quantised-embedding"])
def test_drafts_change_no_token(tmp_path: Path, name: str) -> None:
    """Heads that are quantised, one by one and in one file, and one that is not."""
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    runner = open_mlx(tmp_path)
    ask = Ask(tuple(TOKENS[:9]), SamplingParams(temperature=0.0, max_tokens=16, seed=1, draft=3))
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    assert traffic.run([ask]) == [alone(runner, ask)]
    assert traffic.snapshot.num_draft_tokens > 0


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused(tmp_path: Path, name: str) -> None:
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    model = open_model(str(tmp_path), any_architecture=True)
    with pytest.raises(UnknownModel, match=REFUSED[name]) as raised:
        load_lazily(model, "auto")
    assert "\n" not in str(raised.value)
