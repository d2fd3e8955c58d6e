"""What activations in FP8 cost a trained model: the default one, its matrices rounded to FP8, on a page of our docs.

`python tests/conformance/fp8_quality_report.py` emulates the rounding in PyTorch on a CPU and prints, for each thing
that is rounded, the mean KL divergence of next-token distributions, of all and of peaked ones (top token over 0.9), and
how often the top token stays. The output matrix is not rounded, as in FP8 checkpoints.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from harness import target_logits
from torch import Tensor

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load import OpenedModel, open_model
from slipstream.runners.host.runner import HostRunner
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.ops import DenseLinear

TEXT = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
NUM_TOKENS, PIECE, TILE, MAX_VALUE = 1024, 256, 128, 448.0
VAST = 40_000  # rows of the output matrix, and no other
multiply = DenseLinear.__call__


def rounded(x: Tensor) -> Tensor:
    """To e4m3, with a scale for each 128 columns; the last ones may be fewer."""
    width = x.shape[-1]
    tiles = torch.nn.functional.pad(x.float(), (0, -width % TILE)).unflatten(-1, (-1, TILE))
    largest = tiles.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
    codes = (tiles * (MAX_VALUE / largest)).clamp(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn)
    return (codes.float() * (largest / MAX_VALUE)).flatten(-2)[..., :width].to(x.dtype)


def logits(model: OpenedModel, tokens: list[int], dtype: str, weights: bool, activations: bool) -> Tensor:
    """[tokens, vocab]"""
    config = RunnerConfig(
        "cpu", dtype, kernels=False, kv_memory=400_000_000, max_context=NUM_TOKENS + 64, draft_vocab=0
    )
    runner = TorchBackend(config).load(model, EngineConfig(max_streams=1, max_step_tokens=NUM_TOKENS))
    assert isinstance(runner, HostRunner)
    done: set[int] = set()

    def multiply_rounded(self: DenseLinear, x: Tensor, add: Tensor | None = None) -> Tensor:
        if self.weight.shape[0] > VAST:
            return multiply(self, x, add)
        if weights and id(self) not in done:
            done.add(id(self))
            self.weight.copy_(rounded(self.weight))
        return multiply(self, rounded(x) if activations else x, add)

    DenseLinear.__call__ = multiply_rounded  # type: ignore[method-assign]
    return target_logits(runner, tokens, [PIECE] * (NUM_TOKENS // PIECE), slot=0).float()[4:]


def main() -> None:
    model = open_model(None)
    tokens = list(model.tokenizer.encode(TEXT.read_text()[11_000:17_000]))[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    found = {
        "nothing": logits(model, tokens, "float32", weights=False, activations=False),
        "weights": logits(model, tokens, "float32", weights=True, activations=False),
        "all to bfloat16": logits(model, tokens, "bfloat16", weights=True, activations=False),
        "activations": logits(model, tokens, "bfloat16", weights=True, activations=True),
    }
    names = list(found)
    for before, name in pairwise(names):
        p, q = (found[each].log_softmax(-1) for each in (before, name))
        cost, top = (p.exp() * (p - q)).sum(-1), p.exp().amax(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float().mean()
        peaked = f"peaked {cost[top > 0.9].mean():.5f} ({int((top > 0.9).sum())})"
        print(f"{name}, too: KL {cost.mean():.5f}, {peaked}, same top token {same:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
