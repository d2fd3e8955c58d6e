"""Costs by context: what steps of long streams teach says nothing about short ones."""

from __future__ import annotations

import random

import pytest

from slipstream.engine.contract import StepCosts
from slipstream.speculate.adaptive import Adaptive
from slipstream.speculate.context_cost import ContextCost
from slipstream.speculate.cost_model import CostModel, Decoding, StepTiming
from slipstream.speculate.policy import Load, SamplingRow

DEPTH = 4
SLOPE = 1e-6  # seconds a KV token: 40 ms for 40,000
SHORT, LONG = 200, 40_000


def verify_seconds(num_tokens: int) -> float:
    return (10.0 + 1.5 * num_tokens) / 1e3


def draft_seconds(num_rows: int) -> float:
    return (1.0 + 0.1 * num_rows) / 1e3


class Machine:
    """One stream whose drafts are accepted with a chance of 0.6."""

    def __init__(self, calibrated: float, noise: float = 0.0, share: float = 0.0) -> None:
        """``share``: of the context's cost, for each further token of a row."""
        sizes = (1, 2, 3, 4, 5, 8, 16)
        verify, draft = (tuple((n, of(n)) for n in sizes) for of in (verify_seconds, draft_seconds))
        self.policy = Adaptive(DEPTH, CostModel(StepCosts(verify, draft, context=calibrated, context_share=share)))
        self._noise, self._share, self._held, self.drift = noise, share, 0, 1.0
        self._dice = random.Random(3)

    def run(self, num_steps: int, context: int) -> list[int]:
        """The depths."""
        return [self.step(context) for _ in range(num_steps)]

    def step(self, context: int) -> int:
        [request] = self.policy.decide([SamplingRow("a", DEPTH, context=context)], Load(1, context=context))
        num_accepted = 0
        while num_accepted < self._held and self._dice.random() < 0.6:
            num_accepted += 1
        self.policy.observe_row("a", self._held, num_accepted)
        seconds = (verify_seconds(1 + self._held) + SLOPE * context) * self._dice.gauss(1.0, self._noise) * self.drift
        seconds += self._share * SLOPE * context * self._held * self.drift
        rows = Decoding(1 + self._held, 1, context, self._held * context, (1,) * request.depth, context)
        drafting = request.depth * draft_seconds(1) * self.drift
        self.policy.costs.observe(StepTiming(rows, seconds, drafting))
        self._held = request.depth
        return request.depth


def after_long_streams(machine: Machine) -> Machine:
    for _ in range(4):
        machine.run(100, SHORT)
        machine.run(400, LONG)
    return machine


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("calibrated", [SLOPE, 0.6 * SLOPE, 0.0])
def test_long_streams_do_not_teach_what_short_ones_cost(calibrated: float, noise: float) -> None:
    costs = after_long_streams(Machine(calibrated, noise)).policy.costs.verify
    expected = [verify_seconds(n) + SLOPE * SHORT for n in range(1, 6)]
    assert [costs.at(n, SHORT) for n in range(1, 6)] == pytest.approx(expected, rel=0.1 + noise)


@pytest.mark.parametrize("calibrated", [SLOPE, 0.6 * SLOPE, 0.0])
def test_long_streams_do_not_change_the_depth_of_short_ones(calibrated: float) -> None:
    after, without = after_long_streams(Machine(calibrated)), Machine(calibrated)
    without.run(2000, SHORT)
    assert abs(sum(after.run(40, SHORT)) - sum(without.run(40, SHORT))) <= 4


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_long_context_makes_drafts_worth_more_or_less(share: float) -> None:
    """More where attention to it is paid once, however many tokens a row verifies; less where each token pays."""
    machine = Machine(SLOPE, share=share)
    short = sum(machine.run(400, SHORT)[200:])
    long = sum(machine.run(400, LONG)[200:])
    assert long < 0.5 * short if share else long > 1.5 * short


def test_a_slower_machine_is_not_taken_for_a_long_context() -> None:
    machine = Machine(SLOPE)
    machine.run(300, SHORT)
    machine.drift = 1.5
    machine.run(300, SHORT)
    model = machine.policy.costs.verify
    assert model.at(1, SHORT) == pytest.approx(1.5 * (verify_seconds(1) + SLOPE * SHORT), rel=0.1)
    assert model.of_context(LONG) == pytest.approx(SLOPE * LONG, rel=0.1)


def test_hiccups_hardly_move_the_slope() -> None:
    dice = random.Random(5)
    cost = ContextCost([(1, 0.010), (8, 0.011)], 1e-6)
    for step in range(3000):
        context = 3000 if step // 30 % 2 else 500
        hiccup = 8.0 if dice.random() < 0.02 else 1.0
        cost.observe(
            1 + step % 8, context, (cost.curve.at(1 + step % 8) + 1e-6 * context) * dice.gauss(1.0, 0.03) * hiccup
        )
    assert cost.of_context(1e6) == pytest.approx(1.0, abs=0.4)
