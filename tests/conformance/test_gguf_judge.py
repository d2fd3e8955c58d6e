"""llama.cpp reads the same GGUF files: its greedy tokens, its log-probabilities and its acceptance beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
import torch
from harness import Ask, Traffic, open_gguf_runner, target_logits
from test_gguf import MODELS, TOKENS, mixed
from tiny_gguf import Options

from slipstream.config import EngineConfig
from slipstream.sampling import SamplingParams

pytest.importorskip("xllamacpp")
from llama_judge import NUM_TOKENS, judge

PROMPT = TOKENS[:20]
END = tiny_gguf.tiny.VOCAB - 1  # llama.cpp is told not to end, so it does not take this one


def nvfp4(name: str) -> str:
    """What llama.cpp takes: embedding, output matrix, small projections and the head (layer 4) are not in FP4."""
    in_layers = name.startswith("blk.") and not name.startswith("blk.4.")
    return "NVFP4" if in_layers and "ssm_" not in name else "Q8_0"


# How far its log-probabilities are from ours on average: it rounds inputs of quantised matrices to 8 bits, we do not.
# A wrong order of heads, scale or norm puts them 0.5 and more apart.
CASES = [
    ("dense", "F32", 0.001),
    ("dense-yarn", "F32", 0.001),
    ("moe", "F32", 0.001),
    ("next", "F32", 0.001),
    ("dense", "mixed", 0.05),
    ("moe", "mixed", 0.05),
    ("next", "mixed", 0.1),
    ("dense", "IQ4_XS", 0.1),
    ("dense", "NVFP4", 0.1),
    ("moe", "NVFP4", 0.2),
    *(
        pytest.param("dense", kind, 0.1, marks=pytest.mark.exhaustive)
        for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_K")
    ),
    *(pytest.param("dense", kind, 0.1, marks=pytest.mark.exhaustive) for kind in ("Q6_K", "Q2_K", "Q3_K", "IQ4_NL")),
    *(pytest.param("dense", kind, 0.1, marks=pytest.mark.exhaustive) for kind in ("IQ3_S", "IQ3_XXS", "IQ2_S")),
    *(pytest.param("dense", kind, 0.1, marks=pytest.mark.exhaustive) for kind in ("IQ2_XS", "IQ2_XXS", "IQ1_S")),
    *(pytest.param("dense", kind, 0.1, marks=pytest.mark.exhaustive) for kind in ("IQ1_M", "MXFP4", "TQ2_0")),
    *(pytest.param("moe", kind, 0.2, marks=pytest.mark.exhaustive) for kind in ("Q8_0", "MXFP4")),
]


@pytest.mark.parametrize(("kind", "stored", "close"), CASES)
def test_llama_cpp_says_the_same(tmp_path: Path, kind: str, stored: str, close: float) -> None:
    kinds = {"mixed": mixed, "NVFP4": nvfp4}.get(stored, lambda name: stored)
    path = tiny_gguf.write(MODELS[kind](), tmp_path / "x.gguf", Options(kinds)).path
    theirs = judge(path, PROMPT)
    assert len(theirs.tokens) == NUM_TOKENS
    fed = PROMPT + theirs.tokens[:-1]
    ours = target_logits(open_gguf_runner(path), fed, [len(fed)]).log_softmax(-1)[len(PROMPT) - 1 :]
    pairs = [(float(ours[i, token]), value) for i, top in enumerate(theirs.likeliest) for token, value in top]
    assert sum(abs(mine - value) for mine, value in pairs) / len(pairs) < close
    if stored == "F32":
        assert ours[:, :END].argmax(-1).tolist() == theirs.tokens


def predictable(kind: str) -> torch.nn.Module:
    """Layers add little, so that a token hangs on the one before it: the head can know it."""
    model = MODELS[kind]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight.mul_(0.15)
            if name.endswith("embed_tokens.weight"):
                weight.mul_(16)
    return model


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_llama_cpp_accepts_as_many_drafts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = predictable(kind)
    hidden = model.config.hidden_size
    head = tiny_gguf.head_of(model)
    head["mtp.fc.weight"] = torch.cat([torch.eye(hidden), 0.1 * head["mtp.fc.weight"][:, hidden:]], 1).contiguous()
    monkeypatch.setattr(tiny_gguf, "head_of", lambda model: head)
    path = tiny_gguf.write(model, tmp_path / "x.gguf").path
    theirs = judge(path, PROMPT, draft=3)
    runner = open_gguf_runner(path)
    traffic = Traffic(runner, EngineConfig(max_streams=1))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=1, draft=3, logit_bias={END: -100.0})
    [tokens] = traffic.run([Ask(tuple(PROMPT), params)])
    assert list(tokens) == theirs.tokens
    ours = traffic.snapshot.num_accepted_tokens / traffic.snapshot.num_draft_tokens
    assert theirs.num_accepted / theirs.num_drafted == pytest.approx(ours, abs=0.15)
    assert ours > 0.3
