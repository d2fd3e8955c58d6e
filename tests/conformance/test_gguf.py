"""GGUF files of Qwen3.5 and Qwen3-Next: float32 logits equal `transformers`' with the very numbers of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from harness import Ask, Traffic, alone, open_gguf_runner, target_logits
from tiny_gguf import Options
from transformers import PreTrainedModel

from slipstream.config import EngineConfig
from slipstream.load import open_model
from slipstream.sampling import SamplingParams

TOKENS = torch.randint(0, tiny.VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()
FEEDS = [5, 17, 1, 1, 36]
MODELS = {
    "dense": lambda: tiny_gguf.wide(),
    "dense-three-values": lambda: tiny_gguf.wide(linear_num_value_heads=6, linear_key_head_dim=128),
    "dense-equal-heads-tied": lambda: tiny_gguf.wide(linear_num_key_heads=4, tie_word_embeddings=True),
    "moe": lambda: tiny_gguf.wide(moe=True),
    "next": lambda: tiny_gguf.qwen3_next(),
}
"""Q4_K_M's mixture, by part of a name; Q8_0 and the like elsewhere."""


def mixed(name: str) -> str:
    if "ffn_down" in name or "attn_v" in name or name == "output.weight":
        return "Q6_K"
    if "attn_qkv" in name:
        return "Q5_K"
    return "Q8_0" if "ssm_alpha" in name or "ssm_beta" in name else "Q4_K"


def expected(model: PreTrainedModel, twin: tiny_gguf.Twin) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = tiny_gguf.load(model, twin)(torch.tensor([TOKENS])).logits[0]
    assert logits.std() > 0.3, "logits so flat that anything would agree"
    return logits


def check(model: PreTrainedModel, twin: tiny_gguf.Twin, *, path: Path | None = None, kernels: bool = False) -> None:
    wanted = expected(model, twin)
    logits = target_logits(open_gguf_runner(path or twin.path, kernels=kernels), TOKENS, FEEDS)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", MODELS)
def test_floats(tmp_path: Path, kind: str, kernels: bool) -> None:
    model = MODELS[kind]()
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf"), kernels=kernels)


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_a_mixture_of_block_types(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind]()
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf", Options(mixed)))
