"""The default model on MLX: its GGUF repacked bit for bit, its head, and the reference's tokens and drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx

from slipstream.llm import LLM
from slipstream.load import OpenedModel, dequantize, open_model
from slipstream.runners.mlx.loaders.models import load_target
from slipstream.sampling import SamplingParams

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "reference.json").read_text())[0]


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    return open_model()


def test_packed_weights_are_the_ggufs(opened: OpenedModel) -> None:
    """Q8_0 (the embedding) and Q4_1 (the rest): MLX unpacks the numbers that the gguf package unpacks."""
    model = load_target(opened, "float32")
    layer = model.model.layers[3]
    packed = {
        "model.embed_tokens.weight": (model.model.embed_tokens, 8),
        "model.layers.3.self_attn.q_proj.weight": (layer.self_attn.q_proj, 4),
        "model.layers.3.mlp.down_proj.weight": (layer.mlp.down_proj, 4),
    }
    for name, (module, bits) in packed.items():
        assert module.bits == bits
        weight = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        wanted = dequantize(opened.checkpoint.get(name))
        assert np.abs(np.array(weight) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_it_answers_as_the_reference_does() -> None:
    """Through the whole of `--runner mlx`: loader, runner, engine; the drafts of the reference are accepted."""
    params = SamplingParams(temperature=0.0, max_tokens=len(REFERENCE["greedy_ids"]), draft=3)
    with LLM(runner="mlx", dtype="float32", max_streams=1, max_context=256, draft="off", draft_vocab=0) as llm:
        [output] = llm.generate([REFERENCE["prompt_ids"]], params)
    assert list(output.token_ids) == REFERENCE["greedy_ids"]
    assert output.text == "The capital of France is Paris."
    assert output.stats.accepted_tokens == sum(turn["accepted"] for turn in REFERENCE["rounds"])
