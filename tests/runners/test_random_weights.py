"""Models that are shapes only: loaded without a file, finite through all layers, planned like real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.commands.options import ModelOptions
from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import RowJoin
from slipstream.errors import ConfigError, LoadError
from slipstream.load.hf.config import spec_from_config
from slipstream.load.random.model import RANDOM_SHAPES, open_random
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch import loading
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.loading import TorchRunner
from slipstream.runners.torch.random_weights import open_weights
from slipstream.runners.torch.weights import Weights
from slipstream.sampling import SamplingParams

ENGINE = EngineConfig(max_streams=2, max_depth=2)
FORMS = [("float32", False), ("auto", True), ("int8", True)]


def load(shape: str, dtype: str, kernels: bool) -> tuple[TorchRunner, int]:
    read: list[int] = []
    config = RunnerConfig(device="cpu", dtype=dtype, kernels=kernels)
    return TorchBackend(config).load(open_random(shape), ENGINE, progress=read.append), sum(read)


def logits(runner: TorchRunner) -> torch.Tensor:
    model = runner.model
    model.join(RowJoin(0, (0,), 1, SamplingParams(), 0, 0.0))
    model.grow(0, (0, 1, 2, 3))
    with model.stepping():
        return model.logits(model.forward(range(48), model.lay_out([RowSpan(0, 0, 0, 48)]))).float()


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
@pytest.mark.parametrize(("dtype", "kernels"), FORMS)
def test_logits_are_of_ordinary_size_and_the_same_each_time(shape: str, dtype: str, kernels: bool) -> None:
    (first, read), (second, _) = load(shape, dtype, kernels), load(shape, dtype, kernels)
    found = logits(first)
    assert found.isfinite().all()
    assert 0.3 < found.std() < 3.0
    assert torch.equal(found, logits(second))
    assert len(set(found.argmax(-1).tolist())) > 10
    assert read == open_random(shape).num_bytes
    assert first.info.max_depth == 2


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_every_matrix_has_a_role(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Weights] = []

    def remember(*given: Any) -> Weights:
        opened.append(open_weights(*given))
        return opened[-1]

    monkeypatch.setattr(loading, "open_weights", remember)
    load(shape, "float32", kernels=False)
    roles = {name: role for weights in opened for name, role in weights.roles.items()}
    by_last = {name.rpartition(".")[2]: role for name, role in roles.items()}
    rows = {name for name, role in by_last.items() if role == "row"}
    assert rows == {"o_proj", "out_proj", "down_proj"}
    assert {by_last[name] for name in ("q_proj", "k_proj", "in_proj_qkv", "gate_proj", "embed_tokens")} == {"column"}
    assert by_last["fc"] == by_last.get("gate", "replicated") == "replicated"


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_the_plan_counts_what_is_made(shape: str) -> None:
    model, config = open_random(shape), RunnerConfig(device="cpu", dtype="bfloat16", kernels=False)
    plan = TorchBackend(config).plan_memory(model, ENGINE)
    assert plan.weights + plan.head == model.num_bytes


def test_the_shapes_have_the_sizes_their_names_say() -> None:
    sizes = {shape: open_random(shape).num_bytes / 2e9 for shape in RANDOM_SHAPES}
    assert 0.75 < sizes["qwen3.5-0.8b"] < 0.85
    assert 1.8 < sizes["qwen3.5-2b"] < 2.1
    assert 1.0 < sizes["small-moe"] < 1.4
    assert 26 < sizes["qwen3.5-27b"] < 28
    assert 3.8 < sizes["qwen3.5-4b"] < 4.8
    assert 33 < sizes["qwen3.5-35b-a3b"] < 37


def test_a_shape_is_what_its_config_would_be_read_as() -> None:
    config = json.loads("""{"model_type": "qwen3_5_text", "hidden_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1}""")
    assert spec_from_config(config, {}, "config.json") == RANDOM_SHAPES["qwen3.5-4b"]


def test_a_limited_vocabulary() -> None:
    whole, limited = open_random("qwen3.5-0.8b"), open_random("qwen3.5-0.8b", 65536)
    assert whole.num_bytes - limited.num_bytes == (248320 - 65536) * 1024 * 2
    assert replace(limited.spec, vocab_size=248320) == whole.spec
    for vocab in (0, 255, 248321):
        with pytest.raises(LoadError, match="cannot be limited"):
            open_random("qwen3.5-0.8b", vocab)
    with pytest.raises(ConfigError, match="--vocab"):
        ModelOptions(vocab=1000).open()


def test_text_is_bytes() -> None:
    tokenizer = open_random("tiny").tokenizer
    assert tokenizer.encode("né\n") == list("né\n".encode())
    assert tokenizer.decode([*"né".encode(), 300]) == "né"
    assert tokenizer.eos_token_ids == ()


def test_there_is_nothing_to_read() -> None:
    with pytest.raises(LoadError, match="random"):
        open_random("tiny").checkpoint.get("lm_head.weight")
    with pytest.raises(LoadError, match="tiny-moe"):
        open_random("70b")
