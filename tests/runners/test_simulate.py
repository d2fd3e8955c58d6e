"""Simulated acceptance: the asked rates come out, by position, and what is committed is drafts and then a sample."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import DraftRequest, RowJoin, RowResult, RowStep, StepPlan
from slipstream.errors import ConfigError
from slipstream.load.random.model import open_random
from slipstream.runners.noise import noise_key
from slipstream.runners.simulate import Simulation, pass_rates, uniform
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.loading import TorchRunner
from slipstream.sampling import SamplingParams

HIGH = (0.85, 0.72, 0.60)
PROMPT = (5, 9, 2, 44, 17)


def open_runner(simulate: tuple[float, ...]) -> TorchRunner:
    config = RunnerConfig(device="cpu", dtype="float32", kernels=False, simulate_acceptance=simulate)
    return TorchBackend(config).load(open_random("tiny"), EngineConfig(max_streams=2, max_depth=3))


def read(runner: TorchRunner, tokens: tuple[int, ...], depth: int) -> RowResult:
    """A stream with that prompt joins slot 0."""
    join = RowJoin(0, tokens, len(tokens), SamplingParams(temperature=0.0), 11, 0.0)
    blocks = tuple(range(runner.info.num_blocks // 2))
    runner.submit(StepPlan(0, (), (join,), (RowStep(0, len(tokens), DraftRequest(depth), blocks),)))
    return runner.collect().rows[0]


def decode(runner: TorchRunner, num_steps: int, depth: int = 3) -> list[RowResult]:
    """The results of reading the prompt and of the steps behind it."""
    rows = [read(runner, PROMPT, depth)]
    for step in range(1, num_steps + 1):
        runner.submit(StepPlan(step, (), (), (RowStep(0, 1 + depth, DraftRequest(depth)),)))
        rows += runner.collect().rows
    runner.submit(StepPlan(num_steps + 1, (0,), (), ()))
    runner.collect()
    return rows


def test_the_rule_in_plain_numbers() -> None:
    assert pass_rates(HIGH, 4) == [0.85, 0.72 / 0.85, 0.60 / 0.72, 0.0]
    assert pass_rates((1.0, 0.0), 3) == [1.0, 0.0, 0.0]
    assert uniform(7, 41) == (noise_key(7, 41) >> 40) / 2**24
    simulation = Simulation((0.5, 0.25), 2)
    assert [simulation.passes(7, 40 + i, i) for i in range(2)] == [uniform(7, 40 + i) < 0.5 for i in range(2)]


def test_a_simulated_head_is_as_sure_as_it_is_right() -> None:
    runner = open_runner(HIGH)
    join = RowJoin(0, PROMPT, len(PROMPT), SamplingParams(temperature=0.0), 11, 0.0)
    blocks = tuple(range(runner.info.num_blocks // 2))
    runner.submit(StepPlan(0, (), (join,), (RowStep(0, len(PROMPT), DraftRequest(3, report_confidence=True), blocks),)))
    [row] = runner.collect().rows
    assert row.confidences == pytest.approx(pass_rates(HIGH, 3), abs=1e-6)
    runner.submit(StepPlan(1, (), (), (RowStep(0, 4, DraftRequest(3, 0.65)),)))  # of all three, 0.60 is expected
    [row] = runner.collect().rows
    assert len(row.drafts) == 2


def test_the_rates_come_out() -> None:
    simulation, num_rows = Simulation(HIGH, 4), 40_000
    accepted = [0] * 4
    for seed in range(num_rows):
        for i in range(4):
            if not simulation.passes(seed, 123 + i, i):
                break
            accepted[i] += 1
    assert [count / num_rows for count in accepted] == pytest.approx([*HIGH, 0.0], abs=0.01)


@pytest.mark.parametrize(("simulate", "num_accepted"), [((1.0, 1.0, 0.0), 2), ((0.0,), 0), ((1.0, 1.0, 1.0), 3)])
def test_committed_are_the_accepted_drafts_and_then_a_draw(simulate: tuple[float, ...], num_accepted: int) -> None:
    for before, row in pairwise(decode(open_runner(simulate), 6)):
        assert len(before.drafts) == 3
        assert len(row.tokens) == num_accepted + 1
        assert row.tokens[:-1] == before.drafts[:num_accepted]


def test_a_verdict_depends_on_seed_and_place_only() -> None:
    runner = open_runner(HIGH)
    lengths = [[len(row.tokens) for row in decode(runner, 12)] for _ in range(2)]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0][1:])) > 1


def test_a_stream_whose_drafts_are_all_rejected_is_the_plain_stream() -> None:
    plain = [row.tokens for row in decode(open_runner(()), 10, depth=0)]
    assert [row.tokens for row in decode(open_runner((0.0,)), 10)] == plain


def test_target_and_head_go_on_from_what_was_committed() -> None:
    """The last draw and the drafts behind it are those of a stream that was given all the rest as its prompt."""
    rows = decode(open_runner((1.0, 1.0, 1.0)), 5)
    known = (*PROMPT, *(token for row in rows for token in row.tokens))
    fresh = read(open_runner((1.0, 1.0, 1.0)), known[:-1], 3)
    assert fresh.tokens == known[-1:]
    assert fresh.drafts == rows[-1].drafts


def test_it_is_never_silent() -> None:
    assert "ACCEPTANCE SIMULATED at 0.85/0.72/0.6" in open_runner(HIGH).info.note
    assert "SIMULATED" not in open_runner(()).info.note


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.1,), (0.5, -0.1), (float("nan"),)])
def test_rates_that_cannot_be(rates: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="simulate_acceptance"):
        RunnerConfig(simulate_acceptance=rates)
