"""Log-probabilities are the model's own: those of `transformers` on the same files, whatever changes the draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from harness import Ask, Traffic, open_runner

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner, TokenLogprobs
from slipstream.sampling import SamplingParams

PROMPT = tuple(range(3, 60, 2))
PARAMS = SamplingParams(
    temperature=3.0,
    top_k=40,
    seed=1,
    max_tokens=12,
    draft=3,
    repetition_penalty=1.5,
    logit_bias={7: 9.0},
    logprobs=5,
    prompt_logprobs=20,
)


def check_logprobs(kind: str, runner: Runner) -> None:
    """The prompt is read in pieces, beside another stream; some drafts are accepted."""
    run = Traffic(runner, EngineConfig(max_streams=4, max_step_tokens=20, min_chunk=4, block_size=8))
    run.run([Ask((1, 2), SamplingParams(seed=9, max_tokens=20, draft=2, temperature=4.0)), Ask(PROMPT, PARAMS)])
    assert run.snapshot.num_accepted_tokens > 0
    tokens, reported = [*PROMPT, *run.tokens["1"]], run.logprobs["1"]
    with torch.no_grad():
        logits = tiny.build(kind)(torch.tensor([tokens])).logits[0]
    known = logits.log_softmax(-1)
    assert len(reported) == len(tokens) - 1
    for position, one in enumerate(reported):
        check_one(one, tokens[position + 1], known[position], 20 if position < len(PROMPT) - 1 else 5)
    assert not run.logprobs["0"]


def check_one(reported: TokenLogprobs, token: int, known: torch.Tensor, num_top: int) -> None:
    assert reported.logprob == pytest.approx(known[token].item(), abs=1e-3)
    assert [x for _, x in reported.top] == pytest.approx(known.topk(num_top).values.tolist(), abs=1e-3)
    assert [x for _, x in reported.top] == pytest.approx([known[i].item() for i, _ in reported.top], abs=1e-3)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"])
def test_they_equal_transformers(tmp_path: Path, kind: str, kernels: bool) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    check_logprobs(kind, open_runner(folder, head=True, kernels=kernels))


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5"])
def test_they_equal_transformers_on_mlx(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    from mlx_tiny import open_mlx

    check_logprobs(kind, open_mlx(tiny.save(tiny.build(kind), tmp_path, head=True)))
