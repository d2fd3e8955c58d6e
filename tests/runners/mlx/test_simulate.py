"""Simulated acceptance on MLX: the rule is the host's, so the verdicts are those of every runner."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import tiny

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import DraftRequest, RowJoin, RowStep, StepPlan
from slipstream.load import open_model
from slipstream.runners.mlx.backend import MlxBackend
from slipstream.runners.simulate import Simulation
from slipstream.sampling import SamplingParams

HIGH = (0.85, 0.72, 0.60)
PROMPT = (5, 9, 2, 44, 17)


def test_verdicts_follow_the_rule(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path, head=True)
    config = RunnerConfig(dtype="float32", kv_memory=10_000_000, draft_vocab=0, simulate_acceptance=HIGH)
    runner = MlxBackend(config).load(open_model(str(folder), any_architecture=True), EngineConfig(max_depth=3))
    assert "ACCEPTANCE SIMULATED" in runner.info.note
    join = RowJoin(0, PROMPT, len(PROMPT), SamplingParams(temperature=0.0), 11, 0.0)
    rows = []
    for step in range(13):
        joins, feed = ((join,), len(PROMPT)) if step == 0 else ((), 4)
        runner.submit(StepPlan(step, (), joins, (RowStep(0, feed, DraftRequest(3)),)))
        rows += runner.collect().rows
    simulation, position = Simulation(HIGH, 3), len(PROMPT) + 1
    for before, row in pairwise(rows):
        passes = [simulation.passes(11, position + i, i) for i in range(3)]
        num_accepted = (*passes, False).index(False)
        assert row.tokens[:-1] == before.drafts[:num_accepted]
        assert len(row.tokens) == num_accepted + 1
        position += len(row.tokens)
