"""Depth policies: the simple ones by table, the adaptive one against every fixed depth in a simulated machine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from fakes import make_info

from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.speculate.adaptive import PROBING, Adaptive
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_curve import CostCurve
from slipstream.speculate.cost_model import CostModel, Decoding, StepTiming
from slipstream.speculate.policy import DepthPolicy, Fixed, Load, Off, SamplingRow, Solo

MAX_DEPTH = 4
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320)


@dataclass(frozen=True)
class Machine:
    verify: Callable[[int], float]
    draft: Callable[[int], float]

    @property
    def costs(self) -> CostModel:
        verify = tuple((n, self.verify(n)) for n in GRID)
        return CostModel(StepCosts(verify, tuple((n, self.draft(n)) for n in GRID if n <= 64)))


MACHINES = {
    "flat": Machine(lambda n: 10.0 + 0.01 * n, lambda rows: 0.5 + 0.002 * rows),
    "knee": Machine(lambda n: 13.0 + 0.01 * n + 0.08 * max(0, n - 128), lambda rows: 0.9 + 0.01 * rows),
    "cpu": Machine(lambda n: 6.0 + 3.0 * n, lambda rows: 1.0 + 0.4 * rows),
    "steep": Machine(lambda n: 10.0 * n, lambda rows: 1.0 * rows),
    "moe": Machine(lambda n: 5.0 + 4.0 * min(n, 30) + 0.1 * n, lambda rows: 0.8 + 0.05 * rows),
}


@dataclass
class Simulation:
    """Rows whose drafts are accepted with given chances, on a machine with known costs."""

    machine: Machine
    policy: DepthPolicy
    chances: Sequence[float]  # [rows]
    seed: int = 1
    noise: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.held = [0] * len(self.chances)
        self.tokens, self.seconds = 0.0, 0.0
        self.depths: list[int] = []

    def run(self, num_steps: int) -> float:
        """Tokens a second."""
        start = self.tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        return (self.tokens - start[0]) / (self.seconds - start[1])

    def step(self) -> None:
        num_rows = len(self.chances)
        rows = [SamplingRow(f"r{index}", MAX_DEPTH) for index in range(num_rows)]
        self.depths = depths(self.policy.decide(rows, Load(num_rows)))
        num_tokens = num_rows + sum(self.held)
        passes = tuple(sum(depth > i for depth in self.depths) for i in range(max(self.depths)))
        verify = self.machine.verify(num_tokens) * self.hiccup()
        draft = sum(map(self.machine.draft, passes)) * self.hiccup()
        for row, num_drafted, chance in zip(rows, self.held, self.chances):
            num_accepted = self.accept(num_drafted, chance)
            self.tokens += sum(chance**i for i in range(num_drafted + 1))  # the mean, to keep chance out of the score
            self.policy.observe_row(row.key, num_drafted, num_accepted)
        self.seconds += verify + draft
        self.policy.costs.observe(StepTiming(Decoding(num_tokens, num_rows, pass_rows=passes), verify, draft))
        self.held = self.depths

    def accept(self, num_drafted: int, chance: float) -> int:
        count = 0
        while count < num_drafted and self.random.random() < chance:
            count += 1
        return count

    def hiccup(self) -> float:
        return 20.0 if self.random.random() < self.noise else 1.0


def fixed_rate(machine: Machine, chances: Sequence[float], depth: int) -> float:
    """Tokens a second, in the mean, at one depth for all rows."""
    num_rows = len(chances)
    tokens = sum(sum(chance**i for i in range(depth + 1)) for chance in chances)
    return tokens / (machine.verify(num_rows * (1 + depth)) + depth * machine.draft(num_rows))


def best_fixed(machine: Machine, chances: Sequence[float]) -> float:
    return max(fixed_rate(machine, chances, depth) for depth in range(MAX_DEPTH + 1))


def depths(asks: Sequence[DraftRequest]) -> list[int]:
    return [ask.depth for ask in asks]


def adaptive(machine: Machine) -> Adaptive:
    return Adaptive(MAX_DEPTH, machine.costs)


@pytest.mark.each_pair
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("name", MACHINES)
def test_adaptive_is_as_good_as_the_best_fixed_depth(name: str, chance: float, num_rows: int) -> None:
    machine, chances = MACHINES[name], [chance] * num_rows
    simulation = Simulation(machine, adaptive(machine), chances)
    simulation.run(100)
    rate = simulation.run(max(100, 4000 // num_rows))
    assert rate >= 0.98 * best_fixed(machine, chances)


def test_rows_that_differ_get_depths_that_differ() -> None:
    """Better than any one depth for all: half of the rows accept nearly everything, half nearly nothing."""
    machine, chances = MACHINES["knee"], [0.95, 0.05] * 32
    simulation = Simulation(machine, adaptive(machine), chances)
    simulation.run(200)
    assert simulation.run(100) > 1.1 * best_fixed(machine, chances)


def test_cheap_verification_drafts_deep_and_steep_verification_does_not() -> None:
    for name, chance, depth in (("flat", 0.9, MAX_DEPTH), ("steep", 0.9, 0)):
        simulation = Simulation(MACHINES[name], adaptive(MACHINES[name]), [chance] * 4)
        simulation.run(50)
        assert simulation.depths == [depth] * 4


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.9), (0.9, 0.05)])
def test_it_recovers_when_acceptance_changes(before: float, after: float) -> None:
    machine = MACHINES["cpu"]
    simulation = Simulation(machine, adaptive(machine), [before] * 2)
    simulation.run(400)
    simulation.chances = [after] * 2
    simulation.run(2500)
    assert simulation.run(300) >= 0.96 * best_fixed(machine, [after] * 2)


@pytest.mark.each_value
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("factor", "tilt"), [(2.0, 0.0), (0.5, 0.0), (1.0, 0.15), (1.0, -0.15)])
def test_it_bears_a_calibration_that_was_off(name: str, factor: float, tilt: float) -> None:
    """Off by a factor everywhere, or tilted by 15 % a doubling of the step."""
    true = MACHINES[name]
    believed = Machine(lambda n: factor * true.verify(n) * n**tilt, true.draft)
    simulation = Simulation(true, adaptive(believed), [0.8] * 4)
    simulation.run(1500)
    assert simulation.run(200) >= 0.95 * best_fixed(true, [0.8] * 4)


@pytest.mark.parametrize("name", MACHINES)
def test_without_calibration_it_learns_all_costs(name: str) -> None:
    simulation = Simulation(MACHINES[name], Adaptive(MAX_DEPTH, CostModel()), [0.8] * 4)
    simulation.step()
    assert simulation.depths == [2] * 4
    simulation.run(3000)
    assert simulation.run(300) >= 0.95 * best_fixed(MACHINES[name], [0.8] * 4)


def test_hiccups_do_not_mislead_it() -> None:
    machine = MACHINES["knee"]
    simulation = Simulation(machine, adaptive(machine), [0.8] * 4, noise=0.02)
    simulation.run(500)
    simulation.noise = 0.0
    assert simulation.run(200) >= 0.97 * best_fixed(machine, [0.8] * 4)


def test_without_timings_it_drafts_two() -> None:
    policy = Adaptive(MAX_DEPTH, CostModel())
    rows = [SamplingRow("a", 4), SamplingRow("b", 1)]
    for _ in range(3):
        assert depths(policy.decide(rows, Load(2))) == [2, 1]
        policy.costs.observe(StepTiming(Decoding(5, 2, pass_rows=(2, 1)), 0.0, 0.0))
    assert "until steps have been timed" in policy.reason


@pytest.mark.parametrize("name", MACHINES)
def test_it_knows_what_a_plain_step_takes_while_it_drafts(name: str) -> None:
    machine = MACHINES[name]
    policy = adaptive(machine)
    Simulation(machine, policy, [0.8] * 4).run(200)
    for slower in (1.0, 3.0):
        rows = Decoding(12, 4, pass_rows=(4, 4))
        drafting = StepTiming(rows, slower * machine.verify(12), slower * 2 * machine.draft(4))
        assert policy.costs.plain_seconds(drafting) == pytest.approx(slower * machine.verify(4), rel=0.1)
        plain = StepTiming(Decoding(4, 4), slower * machine.verify(4), 0.0)
        assert policy.costs.plain_seconds(plain) == plain.seconds
    assert CostModel().plain_seconds(drafting) is None


def test_limits_of_rows_and_room_hold() -> None:
    policy = adaptive(MACHINES["flat"])
    rows = [SamplingRow("a", 4), SamplingRow("b", 1), SamplingRow("c", 0)]
    assert depths(policy.decide(rows, Load(3))) == [4, 1, 0]
    for _ in range(200):  # probes too
        assert sum(depths(policy.decide(rows, Load(3, room=3)))) <= 3
    assert depths(policy.decide(rows, Load(3, room=0))) == [0, 0, 0]
    assert depths(policy.decide([], Load(0))) == []


def test_probes_are_rare_and_say_so() -> None:
    machine = MACHINES["steep"]
    simulation = Simulation(machine, adaptive(machine), [0.1])
    simulation.run(300)
    reasons = []
    for _ in range(1000):
        simulation.step()
        reasons.append(simulation.policy.reason)
    probes = [reason for reason in reasons if "tries another depth" in reason]
    assert 2 <= len(probes) <= 1000 // 64
    assert re.fullmatch(r"not drafting now: a plain step \([\d.]+ ms\) is faster than any draft", reasons[0])


def test_of_rows_that_do_not_draft_one_is_probed_again_and_again() -> None:
    """Its head is fed all that it has not seen: for one row that is little, for all of them in turn it is all there is.
    After a while it is another's turn, whose drafts may be better."""
    simulation = Simulation(MACHINES["steep"], adaptive(MACHINES["steep"]), [0.1] * 8)
    simulation.run(300)
    probed = []
    for _ in range(20_000):
        simulation.step()
        if simulation.policy.reason.endswith(PROBING):
            probed.append(tuple(row for row, depth in enumerate(simulation.depths) if depth))
    assert len(probed) > 4 * 16
    assert {len(rows) for rows in probed} == {1}
    changes = sum(before != after for before, after in pairwise(probed))
    assert 3 <= changes <= len(probed) // 16 + 1
    assert len(set(probed)) >= 4


def test_what_a_row_taught_is_forgotten_with_it_but_the_engine_remembers() -> None:
    policy = adaptive(MACHINES["cpu"])
    for _ in range(300):
        policy.observe_row("a", 1, 0)
    assert depths(policy.decide([SamplingRow("a", 4)], Load(1))) == [0]
    policy.forget("a")
    policy.forget("a")
    assert not policy._acceptance._rows
    assert depths(policy.decide([SamplingRow("b", 4)], Load(1))) == [0]


def test_reason_names_gain_and_cost() -> None:
    policy = Adaptive(MAX_DEPTH, CostModel(StepCosts(((1, 0.010), (8, 0.011)), ((1, 0.0005),))))
    policy.decide([SamplingRow("a", 2)], Load(1))
    assert re.fullmatch(
        r"drafting 2 tokens ahead: about 2\.\d tokens in 1\d ms instead of 1 in 10 ms", policy.reason
    ), policy.reason


def test_simple_policies() -> None:
    rows = [SamplingRow("a", 4), SamplingRow("b", 1)]
    assert depths(Off("no head").decide(rows, Load(2))) == [0, 0]
    assert depths(Fixed(3).decide(rows, Load(2))) == [3, 1]
    solo = Solo(Fixed(3))
    assert depths(solo.decide(rows[:1], Load(1))) == [3]
    assert solo.reason == "drafting 3 tokens ahead, as set"
    assert depths(solo.decide(rows, Load(2))) == [0, 0]
    assert solo.reason == "not drafting now: 2 streams are running, and drafts are set for one alone"


def test_a_model_without_head_says_why() -> None:
    info = make_info(max_depth=0, why_no_draft="the checkpoint has no mtp tensors")
    policy = make_policy("adaptive", info, 4, CostModel())
    assert policy.reason == "not drafting: the checkpoint has no mtp tensors"
    assert depths(policy.decide([SamplingRow("a", 0, 3)], Load(1))) == [0]
    assert make_policy(2, make_info(), 0, CostModel()).reason == "not drafting: the largest depth allowed is 0"


def test_requests_override_the_engine() -> None:
    policy = make_policy("off", make_info(), 4, Machine(lambda n: 10.0, lambda rows: 0.01).costs)
    rows = [SamplingRow("a", 3), SamplingRow("b", 3, 2), SamplingRow("c", 3, "off"), SamplingRow("d", 3, "adaptive")]
    rows += [SamplingRow("e", 3, "solo"), SamplingRow("f", 3, 0)]
    assert depths(policy.decide(rows, Load(6))) == [0, 2, 0, 3, 0, 0]
    assert policy.reason == "not drafting: the server's settings turn drafting off"
    assert policy.why_plain("off") == "the request turned drafting off"
    assert policy.why_plain("solo") == "other streams were running"
    assert depths(policy.decide([SamplingRow("e", 3, "solo")], Load(1))) == [3]


def test_curve_interpolates_extrapolates_and_never_falls() -> None:
    curve = CostCurve([(2, 1.0), (4, 3.0), (8, 2.0), (16, 6.0)])
    assert curve.at(1) == curve.at(2) == 1.0
    assert curve.at(4) == curve.at(6) == curve.at(8) == 2.5
    assert curve.at(12) == pytest.approx(4.25)
    assert curve.at(24) == pytest.approx(9.5)
    values = curve.span(1, 40)
    assert values == [curve.at(x) for x in range(1, 41)]
    assert values == sorted(values)


def test_curve_follows_what_it_sees() -> None:
    curve = CostCurve([(1, 1.0), (8, 2.0)])
    for _ in range(200):
        curve.observe(8, 4.0)
        curve.observe(64, 20.0)
    assert curve.at(8) == pytest.approx(4.0, rel=0.05)
    assert curve.at(64) == pytest.approx(20.0, rel=0.05)
    curve.observe(8, 1000.0)
    assert curve.at(8) < 6.0


def test_a_machine_that_slows_down_moves_the_whole_curve() -> None:
    """Only one size is seen while it does; the others must not look cheap for it."""
    curve = CostCurve([(8, 0.010), (16, 0.020)])
    for _ in range(400):
        curve.observe(8, 0.018)
    assert curve.at(8) == pytest.approx(0.018, rel=0.05)
    assert curve.at(16) > 1.9 * curve.at(8)


def test_next_to_a_prompt_drafts_are_worth_no_more_than_without_it() -> None:
    """The step is long in any case: what a draft adds must beat what the rows alone make of that time."""
    costs = StepCosts([(n, 0.010 + 0.001 * n) for n in (1, 8, 16, 64, 128)], [(1, 0.001), (8, 0.002)])
    policy = Adaptive(4, CostModel(costs))
    rows = [SamplingRow(str(i), 4) for i in range(8)]
    for i in range(800):
        policy.observe_row(str(i % 8), 1, int(i % 10 < 3))
    assert [ask.depth for ask in policy.decide(rows, Load(8))] == [0] * 8
    assert [ask.depth for ask in policy.decide(rows, Load(8, num_other_tokens=64))] == [0] * 8


@pytest.mark.parametrize("num_plain", [1, 8, 15])
def test_rows_that_want_no_drafts_keep_their_pace(num_plain: int) -> None:
    """A GPU's costs: alone, the others would draft as deep as they may and make every step a quarter longer."""
    machine = Machine(lambda n: 0.0150 + 0.00004 * n + 0.0003 * (n > 16), lambda n: 0.00035)
    policy = make_policy("adaptive", make_info(), 3, machine.costs)
    rows = [SamplingRow(str(i), 3, "off" if i < num_plain else None) for i in range(16)]
    for i in range(1600):
        policy.observe_row(str(i % 16), 3, 3)
    seconds, num_drafts, reasons = 0.0, 0, set()
    for _ in range(400):
        chosen = depths(policy.decide(rows, Load(16)))
        assert not any(chosen[:num_plain])
        passes = [sum(depth > i for depth in chosen) for i in range(max(chosen))]
        seconds += machine.verify(16 + sum(chosen)) + sum(map(machine.draft, passes))
        num_drafts += sum(chosen)
        reasons.add(policy.reason)
    assert 0.96 < 400 * machine.verify(16) / seconds < 0.98
    assert num_drafts > 0.03 * 400 * 0.015 / 0.0015
    assert any(f"{num_plain} that want no drafts keep their pace" in reason for reason in reasons)
    drafting = [SamplingRow(row.key, 3) for row in rows]
    assert depths(policy.decide(drafting, Load(16))) == [3] * 16
    assert "keep their pace" not in policy.reason


def test_tokens_of_plain_rows_count() -> None:
    """Fifteen plain rows wait while one drafts: what it gains must be more than what they lose."""
    machine = Machine(lambda n: 0.010 + 0.0005 * n, lambda n: 0.0001)
    policy = make_policy("adaptive", make_info(), 1, machine.costs)
    for i in range(800):
        policy.observe_row("a", 1, int(i % 10 < 3))
    rows = [SamplingRow("a", 1)]
    assert depths(policy.decide(rows, Load(1))) == [1]
    rows += [SamplingRow(f"p{i}", 1, "off") for i in range(15)]
    assert depths(policy.decide(rows, Load(16))) == [0] * 16


def test_a_choice_not_to_draft_stands_for_some_steps_and_not_for_others() -> None:
    costs = StepCosts([(n, 0.010 + 0.001 * n) for n in (1, 8, 16)], [(1, 0.001), (8, 0.002)])
    policy = Adaptive(4, CostModel(costs))
    rows = [SamplingRow(str(i), 4) for i in range(8)]
    for i in range(800):
        policy.observe_row(str(i % 8), 1, 0)
    assert not any(ask.depth for ask in policy.decide(rows, Load(8)))
    for i in range(800):
        policy.observe_row(str(i % 8), 4, 4)
    stood = 0
    while not any(ask.depth for ask in policy.decide(rows, Load(8))):
        stood += 1
    assert 0 < stood <= 8
