"""Drafts ended by the head's confidence: its calibration, and the policy in a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fakes import FakeRunner, Harness, make_info, make_request

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.engine.scheduler import Scheduler
from slipstream.speculate.adaptive import Adaptive
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.confidence import ConfidenceCalibration, Thresholds
from slipstream.speculate.cost_model import CostModel, Decoding, StepTiming
from slipstream.speculate.policy import Load, SamplingRow
from slipstream.speculate.tuning import TUNING

DEPTH = 4


def teach(
    calibration: ConfidenceCalibration,
    rate: Callable[[float], float],
    num_chains: int = 4000,
    key: str = "a",
    seed: int = 1,
) -> None:
    """Chains of one draft, of every confidence, accepted at the given rate."""
    dice = random.Random(seed)
    for _ in range(num_chains):
        confidence = dice.random()
        calibration.observe_proposal((confidence,))
        calibration.observe_verdict(key, (confidence,), int(dice.random() < rate(confidence)))


def test_the_threshold_is_where_chains_are_accepted_often_enough() -> None:
    honest, proud = ConfidenceCalibration(DEPTH), ConfidenceCalibration(DEPTH)
    teach(honest, lambda confidence: confidence)
    teach(proud, lambda confidence: confidence / 2)
    for chance in (0.2, 0.4):
        assert honest.threshold("b", chance) == pytest.approx(chance, abs=0.13)
        assert proud.threshold("b", chance) == pytest.approx(2 * chance, abs=0.26)
    assert proud.threshold("b", 0.7) is None
    assert proud.outlook("b", 4, Thresholds(None, None)) == []
    assert honest.threshold("b", 0.0) == 0.0


def test_the_outlook_counts_kept_and_accepted_drafts() -> None:
    calibration = ConfidenceCalibration(DEPTH)
    teach(calibration, lambda confidence: confidence)
    [(_, all_kept, all_accepted)] = calibration.outlook("b", 1, Thresholds(0.0, 0.0))
    [(made, kept, accepted)] = calibration.outlook("b", 1, Thresholds(0.5, 0.5))
    assert made == 1.0
    assert all_kept == pytest.approx(1.0)
    assert all_accepted == pytest.approx(0.5, abs=0.1)
    assert calibration.first_draft_acceptance() == pytest.approx(all_accepted)
    assert kept == pytest.approx(0.5, abs=0.12)
    assert accepted == pytest.approx(0.375, abs=0.1)


def test_a_chain_is_as_confident_as_all_its_drafts_together() -> None:
    calibration = ConfidenceCalibration(2)
    for _ in range(1000):
        calibration.observe_proposal((0.7, 0.5))
    assert [kept > 0.99 for _, kept, _ in calibration.outlook("a", 2, Thresholds(0.3, 0.3))] == [True, True]
    assert [kept > 0.01 for _, kept, _ in calibration.outlook("a", 2, Thresholds(0.5, 0.5))] == [True, False]


def test_a_draft_is_made_if_the_one_before_it_was_sure_enough_to_go_on() -> None:
    calibration = ConfidenceCalibration(3)
    for _ in range(1000):
        calibration.observe_proposal((0.9, 0.9, 0.9))
        calibration.observe_proposal((0.4,))  # went no further
    (first, _, _), (second, kept, _), (third, _, _) = calibration.outlook("a", 3, Thresholds(0.25, 0.5))
    assert first == 1.0
    assert second == third == pytest.approx(0.5, abs=0.02)
    assert kept == pytest.approx(second, abs=0.02)
    assert [made for made, _, _ in calibration.outlook("a", 3, Thresholds(0.25, None))] == [1.0, 0.0, 0.0]


def test_a_row_with_a_low_acceptance_ratio_needs_more_confidence_and_is_forgotten() -> None:
    calibration = ConfidenceCalibration(DEPTH)
    teach(calibration, lambda confidence: confidence)
    before = calibration.threshold("b", 0.4)
    teach(calibration, lambda confidence: confidence / 4, num_chains=60, key="b")
    assert calibration.acceptance_ratio("b") < 0.75
    assert calibration.threshold("b", 0.4) > before
    calibration.forget("b")
    calibration.forget("b")
    assert calibration.acceptance_ratio("b") == 1.0


def test_old_chains_decay_and_weights_stay_finite() -> None:
    calibration = ConfidenceCalibration(1)
    for confidence in (0.1, 0.9):
        for _ in range(5000):
            calibration.observe_proposal((confidence,))
    assert calibration.outlook("a", 1, Thresholds(0.8, 0.8))[0][1] > 0.999
    assert all(len(counts) == TUNING.confidence.num_bins and sum(counts) < 1e12 for counts in calibration._counts)


@dataclass
class Simulation:
    """Rows whose drafts are as confident as dice say, and accepted as often as that, on a machine with known costs."""

    policy: Adaptive
    verify: Callable[[float], float]
    draft: float
    num_rows: int = 1
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    tokens: float = 0.0
    seconds: float = 0.0
    ask: DraftRequest | None = None

    def run(self, num_steps: int) -> float:
        """Tokens a second."""
        start = self.tokens, self.seconds
        held: list[tuple[float, ...]] = [()] * self.num_rows
        for _ in range(num_steps):
            held = self.step(held)
        return (self.tokens - start[0]) / (self.seconds - start[1])

    def step(self, held: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
        rows = [SamplingRow(f"r{i}", DEPTH) for i in range(self.num_rows)]
        asks = self.policy.decide(rows, Load(self.num_rows))
        self.ask = asks[0]
        num_tokens = self.num_rows + sum(map(len, held))
        for row, chain in zip(rows, held):
            self.policy.observe_row(row.key, len(chain), self.accepted(chain), chain)
        proposals = [self.propose(ask) for ask in asks]
        taking_part = [len(found) for _, found in proposals]
        passes = tuple(sum(n > i for n in taking_part) for i in range(max(taking_part)))
        verify, draft = self.verify(num_tokens), self.draft * len(passes)
        self.policy.costs.observe(StepTiming(Decoding(num_tokens, self.num_rows, pass_rows=passes), verify, draft))
        self.seconds += verify + draft
        return [drafts for drafts, _ in proposals]

    def accepted(self, chain: tuple[float, ...]) -> int:
        expected, count = 1.0, len(chain)
        for position, confidence in enumerate(chain):
            if self.dice.random() >= confidence:
                count = position
                break
        for position in range(len(chain)):
            expected += product(chain[: position + 1])  # the mean, to keep chance out of the score
        self.tokens += expected
        return count

    def propose(self, ask: DraftRequest) -> tuple[tuple[float, ...], tuple[float, ...]]:
        confidences: list[float] = []
        num_kept = 0
        while num_kept < ask.depth:
            confidences.append(self.dice.choice((0.1, 0.2, 0.3, 0.5, 0.9, 0.98, 0.98)))
            if product(confidences) < ask.threshold:
                break
            num_kept += 1
            if product(confidences) < ask.continue_threshold:
                break
        if confidences:
            self.policy.observe_proposal(confidences)
        return tuple(confidences[:num_kept]), tuple(confidences)


def product(values: tuple[float, ...] | list[float]) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result


def simulate(slope: float, policy: Adaptive | None = None, num_rows: int = 1) -> Simulation:
    def verify(num_tokens: float) -> float:
        return 0.004 + slope * (num_tokens - num_rows)

    costs = StepCosts(tuple((n, verify(n)) for n in range(1, 40)), tuple((n, 0.0003) for n in (1, 2, 4, 8)))
    return Simulation(policy or Adaptive(DEPTH, CostModel(costs), stops_early=True), verify, 0.0003, num_rows)


class Held(Adaptive):
    """Always the same depth and thresholds; it learns nothing, which is most of a simulation's time."""

    def __init__(self, ask: DraftRequest) -> None:
        super().__init__(DEPTH, Unlearning())
        self._ask = ask

    def decide(self, rows: object, load: Load) -> list[DraftRequest]:
        return [self._ask] * load.num_running

    def observe_row(self, *observed: object) -> None:
        """Decides nothing."""

    def observe_proposal(self, confidences: object) -> None:
        """Decides nothing."""


class Unlearning(CostModel):
    def observe(self, timing: object) -> None:
        """Decides nothing."""


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("slope", [0.0002, 0.001, 0.002, 0.003])
def test_it_finds_the_best_thresholds_and_depth(slope: float, num_rows: int) -> None:
    values = (0.0, 0.2, 0.4, 0.7, 0.9)
    # A continue threshold that is not above the draft threshold ends nothing more.
    pairs = [(draft, go_on) for draft in values for go_on in values if go_on == 0.0 or go_on > draft]
    asks = [DraftRequest(0), *(DraftRequest(depth, *each) for depth in range(1, DEPTH + 1) for each in pairs)]
    best = max(simulate(slope, Held(ask), num_rows).run(1500 // num_rows) for ask in asks)
    simulation = simulate(slope, num_rows=num_rows)
    simulation.run(600)
    assert simulation.run(3000) >= 0.96 * best


def test_a_threshold_beats_every_depth_without_one() -> None:
    slope = 0.0015
    without = max(simulate(slope, Held(DraftRequest(depth))).run(2000) for depth in range(DEPTH + 1))
    simulation = simulate(slope)
    simulation.run(600)
    assert simulation.run(2000) > 1.06 * without


def test_the_reason_names_the_threshold() -> None:
    simulation = simulate(0.002)
    simulation.run(300)
    assert simulation.ask is not None
    assert 0.3 <= simulation.ask.threshold <= 0.9
    assert f" while at least {100 * simulation.ask.threshold:.0f} % sure: " in simulation.policy.reason


@pytest.mark.parametrize("lag", [0, 1])
def test_confidences_reach_the_policy_through_the_scheduler(lag: int) -> None:
    """A head that is right as often as it says: most of the verified drafts are accepted, late results or not."""
    info = make_info(lag=lag, max_context=2000, num_blocks=600, stops_early=True)
    config = EngineConfig(max_streams=4)

    def verify(num_tokens: int) -> float:
        return 4.0 + 2.0 * (num_tokens - 1)

    runner = FakeRunner(info, reports=True, verify=verify, draft=lambda rows: 0.1)
    costs = CostModel(runner.calibrate(range(1, 20), range(1, 5)))
    policy = make_policy("adaptive", info, 4, costs)
    scheduler = Scheduler(info, policy, config, clock=lambda: 1.0, costs=costs)
    harness = Harness(scheduler, runner)
    harness.add(make_request("a", max_tokens=1500))
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    assert stats.draft_tokens > 200
    assert stats.acceptance_rate > 0.6  # 0.5 without a threshold
    assert max(row.draft.threshold for plan in runner.plans for row in plan.rows) > 0.3
