"""What activations in FP8 cost: the KL divergence of next-token distributions, beside that of bfloat16 and FP8 weights.

Emulated in PyTorch, on tiny models of random weights. Peaked: the same logits, sharpened.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_fp8
import torch
from fp8_emulation import open_floats
from torch import Tensor

SHARPNESS = {"random": 1.0, "peaked": 16.0}


def divergence(logits: Tensor, others: Tensor, sharpness: float) -> float:
    """Mean KL(softmax(logits) || softmax(others)), in nats."""
    p, q = ((each.float() * sharpness).log_softmax(-1) for each in (logits, others))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def logits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """By what is rounded. [tokens, vocab]"""
    original = tiny_fp8.build(request.param)
    folder: Path = tiny_fp8.save(original, tmp_path_factory.mktemp("model"))
    tokens = torch.randint(tiny.VOCAB, (8, 48), generator=torch.Generator().manual_seed(1))
    models = {
        "nothing": original.eval(),
        "weights": open_floats(folder, torch.float32, rounds=False),
        "weights, all to bfloat16": open_floats(folder, torch.bfloat16, rounds=False),
        "weights, all to bfloat16, activations": open_floats(folder, torch.bfloat16, rounds=True),
    }
    with torch.no_grad():
        return {name: model(tokens).logits.flatten(0, 1) for name, model in models.items()}


@pytest.mark.parametrize("kind", SHARPNESS)
def test_activations_cost_about_what_weights_did(
    logits: dict[str, Tensor], kind: str, record_property: pytest.RecordProperty
) -> None:
    sharpness, before = SHARPNESS[kind], logits["weights, all to bfloat16"]
    top = (logits["weights"] * sharpness).softmax(-1).amax(-1).mean()
    assert (top > 0.85) == (kind == "peaked")
    costs = {
        "weights": divergence(logits["nothing"], logits["weights"], sharpness),
        "bfloat16": divergence(logits["weights"], before, sharpness),
        "activations": divergence(before, logits["weights, all to bfloat16, activations"], sharpness),
    }
    for name, cost in costs.items():
        record_property(name, cost)
    print(kind, costs)
    assert costs["bfloat16"] < costs["activations"], "they are rounded"
    assert costs["activations"] < 2 * costs["weights"]
