"""YaRN as published configurations and GGUF files ask for it: the same fields, context and frequencies from both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.errors import CorruptFile, LoadError
from slipstream.load.gguf.file import open_gguf
from slipstream.load.hf.config import spec_from_config
from slipstream.load.spec import ModelSpec, RopeSpec, YarnSpec, yarn_scale
from slipstream.runners.torch.models.layers import rotary_table

QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # as the README of Qwen2.5 says it
AS_PUBLISHED = YarnSpec(4.0, 32768, rotary_scale=yarn_scale(4.0))
GGUF = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_config(config | changes, {}, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": QWEN, "max_position_embeddings": 32768},
        {"rope_scaling": QWEN, "max_position_embeddings": 131072},
        {"rope_scaling": {**QWEN, "type": None, "rope_type": "yarn"}, "max_position_embeddings": 40960},
        {"rope_parameters": {**QWEN, "rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
        {"rope_scaling": {**QWEN, "beta_fast": None, "mscale": 0.0, "mscale_all_dim": 1.0}},
    ],
)
def test_configurations(build: Any, changes: dict[str, Any]) -> None:
    found = spec(build.config, **changes)
    assert found.rope == RopeSpec(10000.0, 16, yarn=AS_PUBLISHED)
    assert found.max_context == 131072, "four times the original context"


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_files(build: Any, tmp_path: Path, arch: str) -> None:
    metadata = {f"{arch}.rope.scaling.{key}": value for key, value in GGUF.items()}
    found = open_gguf(build.gguf(tmp_path / "x.gguf", arch=arch, metadata=metadata)).spec
    assert found.rope == RopeSpec(10000.0, 16, yarn=AS_PUBLISHED)
    assert found.max_context == 131072
    more = {f"{arch}.rope.scaling.yarn_beta_{key}": value for key, value in (("fast", 8.0), ("slow", 0.1))}
    other = open_gguf(build.gguf(tmp_path / "y.gguf", arch=arch, metadata=metadata | more)).spec.rope.yarn
    assert other is not None
    assert (other.fast_turns, other.slow_turns) == (8.0, 0.1)


# Qwen2.5-7B, a small head with a small theta, Qwen3.5's rotary quarter for a million tokens.
SIZES = [(1e6, 128, 1.0, 32768), (1e4, 64, 1.0, 4096), (1e7, 256, 0.25, 262144)]
WAYS: list[dict[str, Any]] = [
    {},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"truncate": False},
    {"attention_factor": 1.25},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"factor": 1.0},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("theta", "head_dim", "part", "original"), SIZES)
def test_frequencies_are_those_of_transformers(
    build: Any, theta: float, head_dim: int, part: float, original: int, way: dict[str, Any]
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, **way}
    rope |= {"rope_theta": theta, "partial_rotary_factor": part}
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=original, rope_parameters=copy.deepcopy(rope))
    frequency, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found = spec(build.config, model_type="qwen3", head_dim=head_dim, rope_parameters=rope).rope
    table = rotary_table(found, 2, torch.device("cpu"))
    torch.testing.assert_close(table.cos[1], frequency.cos() * scale, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(table.sin[1], frequency.sin() * scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "attention_factor", "original", "rope_theta"])
@pytest.mark.parametrize("value", [1e-310, 1.0, 1e308, 2**40, 10**400, 0, -1, "4", [], True], ids=range(10))
def test_absurd_numbers_are_refused_or_do_no_harm(build: Any, key: str, value: Any) -> None:
    name = "original_max_position_embeddings" if key == "original" else key
    try:
        found = spec(build.config, rope_parameters={**QWEN, "rope_theta": 1e4, name: value})
    except CorruptFile:
        return
    assert found.max_context >= 1
    assert len(rotary_table(found.rope, 4, torch.device("cpu")).cos) == 4


def test_a_factor_is_needed(build: Any) -> None:
    with pytest.raises(LoadError, match="'factor'"):
        spec(build.config, rope_scaling={"type": "yarn"})
