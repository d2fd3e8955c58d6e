"""The MLX runner under the same random traffic as the others: plain decoding's tokens for every stream, raw and packed.

And against the PyTorch runner: the same tokens from the same float32 files, greedy and seeded, drafting or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import tiny
from drafters import ScriptedDrafter
from harness import Ask, Traffic, alone, open_runner
from hypothesis import settings
from test_resident import traffic as some_traffic
from traffic import any_traffic, check

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner, StepPlan, StepResult
from slipstream.errors import UnknownModel
from slipstream.sampling import SamplingParams

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

from mlx_tiny import open_mlx, packed

from slipstream.runners.mlx.loading import MlxRunner

KINDS = {
    "llama-gqa-tied": ("llama-gqa-tied", 0),
    "llama-4bit": ("llama-gqa-tied", 4),
    "qwen3_5": ("qwen3_5", 0),
    "qwen3_5-8bit": ("qwen3_5", 8),
    "qwen3_5_moe": ("qwen3_5_moe", 0),
    "qwen3_5_moe-4bit": ("qwen3_5_moe", 4),
}
QUICK = ("llama-4bit", "qwen3_5", "qwen3_5_moe-4bit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlx")


@lru_cache
def _runner(folder: Path, name: str) -> MlxRunner:
    kind, bits = KINDS[name]
    raw = tiny.save(tiny.build(kind), folder / name, head=True)
    return open_mlx(packed(raw, folder / f"{name}-packed", bits) if bits else raw)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
)
@settings(max_examples=12)
@any_traffic
def test_streams_equal_plain_decoding(
    folder: Path,
    kind: str,
    traffic: list[Ask],
    mode: str,
    late: bool,
    block_size: int,
    tight: bool,
    budget: int,
    floors: tuple[float, ...],
) -> None:
    limits = (block_size, 80 if tight else 600)
    runner = _runner(folder, kind)
    run = {"late": late, "mode": mode, "budget": budget, "floors": floors}
    check(runner, _scripted, traffic, **run, limits=limits, tolerance=1e-3)


def _scripted(truth: Mapping[int, Sequence[int]], mode: str) -> ScriptedDrafter:
    return ScriptedDrafter(truth, tiny.VOCAB, mode)


class Recorder:
    """Passes plans through and keeps what every row did, but for the head's confidences."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.info = runner.info
        self.rows: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self.rows += [(row.slot, row.num_fed, row.tokens, row.drafts) for row in result.rows]
        return result


def test_what_mlx_lm_does_not_read_of_yarn_is_refused(tmp_path: Path) -> None:
    raw = tiny.save(tiny.build("llama-yarn"), tmp_path)
    with pytest.raises(UnknownModel, match=r"read attention_factor and truncate of YaRN; take --runner torch\.$"):
        open_mlx(raw)


@pytest.mark.parametrize("kind", [kind for kind in tiny.MODELS if kind != "llama-yarn"])
def test_tokens_equal_the_torch_runners(tmp_path: Path, kind: str) -> None:
    raw = tiny.save(tiny.build(kind), tmp_path, head=True)
    torch_runner = open_runner(raw, head=True)
    # When it is hot the noise decides, which the head knows: many drafts are accepted.
    hot = SamplingParams(temperature=4.0, max_tokens=12, draft=3, seed=9)
    asks = [*some_traffic(5, 24), Ask((1, 2, 3), hot), Ask((4,) * 9, replace(hot, draft=2, seed=10), arrival=2)]
    config = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
    ours, theirs = Recorder(open_mlx(raw)), Recorder(torch_runner)
    run = Traffic(ours, config)
    for i, (got, ask) in enumerate(zip(run.run(asks), asks, strict=True)):
        want = alone(torch_runner, ask)
        assert got == (want[: len(got)] if run.finished[str(i)].finish_reason == "abort" else want)
    # Not only the tokens: step by step the heads proposed the same drafts, and some of them behind accepted ones.
    Traffic(theirs, config).run(asks)
    assert ours.rows == theirs.rows
    assert any(len(tokens) > 1 and len(drafts) > 1 for _, _, tokens, drafts in ours.rows)
