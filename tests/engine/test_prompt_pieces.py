"""How large the pieces of prompts are: by the cost of steps on simulated machines, and through the scheduler."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import median

import pytest
from fakes import FakeRunner, Harness, continuation, make_info, make_request

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.engine.prompt_pieces import UNTIMED, PromptPieces
from slipstream.engine.scheduler import Scheduler
from slipstream.errors import ConfigError
from slipstream.speculate.adaptive import Adaptive
from slipstream.speculate.cost_model import CostModel, Decoding, Reading, StepTiming
from slipstream.speculate.policy import Fixed, Load, Off, SamplingRow

Seconds = Callable[[int], float]
NOBODY = Decoding(0, 0)
BUCKETS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 1024)
# Milliseconds by tokens, as of an H200 with a 27B model.
LEVELS = (13.9, 15.0, 16.0, 17.2, 17.8, 20.5, 21.5, 33.0, 33.5, 34.0, 64.0)


def stairs(num_tokens: int) -> float:
    return LEVELS[bisect_left(BUCKETS, num_tokens)] / 1e3


MACHINES: dict[str, Seconds] = {
    "cpu": lambda n: (4.0 + 1.1 * n) / 1e3,
    "flat": lambda n: (10.0 + 0.01 * n) / 1e3,
    "knee": lambda n: (10.0 + 0.01 * n + 0.3 * max(0, n - 64)) / 1e3,
    "stairs": stairs,
}


def calibrated(machine: Seconds, largest: int = 512) -> CostModel:
    """Points at both ends of each bucket, as the CUDA runner has them, up to ``largest`` tokens."""
    sizes = sorted({1, 2, 4, 8, *BUCKETS, *(n + 1 for n in BUCKETS)})
    points = tuple((n, machine(n)) for n in sizes if n <= largest)
    return CostModel(StepCosts(points, read=points))


def pieces(costs: CostModel, sizes: tuple[int, ...] = (), **config: float) -> PromptPieces:
    return PromptPieces(make_info(step_sizes=sizes), EngineConfig(**config), costs)  # type: ignore[arg-type]


def largest_within(machine: Seconds, num_decoding: int, seconds: float, budget: int = 512) -> int:
    fitting = [n for n in range(1, budget - num_decoding + 1) if machine(num_decoding + n) <= seconds]
    return max(fitting, default=1)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("num_rows", [1, 8, 60])
def test_the_largest_piece_within_the_factor(name: str, factor: float, num_rows: int) -> None:
    machine = MACHINES[name]
    found = pieces(calibrated(machine), max_slowdown=factor).size(Decoding(num_rows, num_rows), 2000)
    expected = largest_within(machine, num_rows, factor * machine(num_rows))
    assert found == pytest.approx(expected, rel=0.02, abs=1)
    assert machine(num_rows + found) <= 1.001 * factor * machine(num_rows) or found == 1


def test_drafts_and_contexts_are_part_of_the_undisturbed_step() -> None:
    points = tuple((n, MACHINES["cpu"](n)) for n in (1, 8, 64, 512))
    costs = CostModel(StepCosts(points, ((1, 0.004), (8, 0.004)), context=1e-6, read=points, read_context=1e-5))
    rule = pieces(costs)
    alone = rule.size(Decoding(4, 4), 512)
    assert rule.size(Decoding(4, 4, context=11_000), 512) == alone + 10  # 11 ms more that it may add
    assert rule.size(Decoding(4, 4, pass_rows=(4, 4)), 512) == alone + 7
    assert rule.size(Decoding(8, 4), 512) == alone + 4
    assert rule.size(Decoding(4, 4), 512, num_before=100_000) < alone / 2  # its own context is dear as well


def drive(machine: Seconds, costs: CostModel, factor: float, noise: float, hiccups: float) -> list[float]:
    """Eight streams decode beside a prompt without end, and now and then without it; the steps' true slowdowns."""
    sizes = BUCKETS if machine is stairs else ()
    rule, dice, slowdowns = pieces(costs, sizes, max_slowdown=factor), random.Random(1), []
    rows = Decoding(8, 8)
    for step in range(600):
        reads = step % 4 != 0
        piece = rule.size(rows, 504) if reads else 0
        seconds = machine(8 + piece) * dice.gauss(1.0, noise) * (10.0 if dice.random() < hiccups else 1.0)
        costs.observe(StepTiming(rows, seconds, 0.0, reading=Reading(piece)))
        if step % 50 == 0:  # prompts alone, of any length
            length = dice.choice((20, 70, 300))
            costs.observe(StepTiming(NOBODY, machine(length), 0.0, reading=Reading(length)))
        slowdowns += [machine(8 + piece) / machine(8)] * reads
    return slowdowns[200:]


@pytest.mark.parametrize("known", [0, 64, 512])
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("noise", "hiccups"), [(0.0, 0.0), (0.05, 0.0), (0.03, 0.02)])
def test_the_factor_holds_whatever_the_timings_are_like(name: str, known: int, noise: float, hiccups: float) -> None:
    """``known``: steps were calibrated up to so many tokens; the rest is learned."""
    machine = MACHINES[name]
    costs = calibrated(machine, known) if known else CostModel()
    slowdowns = drive(machine, costs, 2.0, noise, hiccups)
    possible = machine(8 + largest_within(machine, 8, 2.0 * machine(8))) / machine(8)
    assert median(slowdowns) <= 2.2
    assert sorted(slowdowns)[int(0.95 * len(slowdowns))] <= 2.6
    assert median(slowdowns) - 1.0 >= 0.6 * (possible - 1.0)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_slows_down_beside_a_prompt_goes_on_reading(name: str) -> None:
    """No step decodes alone, so nothing else says that it did."""
    machine, rows = MACHINES[name], Decoding(8, 8)
    costs = calibrated(machine)
    rule, found = pieces(costs, BUCKETS if machine is stairs else ()), []
    for step in range(400):
        found.append(rule.size(rows, 504))
        slower = 2.5 if step > 50 else 1.0
        costs.observe(StepTiming(rows, slower * machine(8 + found[-1]), 0.0, reading=Reading(found[-1])))
    assert median(found[50:150]) > 1
    assert median(found[-100:]) >= 0.6 * found[0]


def test_a_calibration_that_was_off_is_corrected() -> None:
    machine = MACHINES["cpu"]
    for believed in (lambda n: 2.0 * machine(n), lambda n: machine(1) + 0.25 * (machine(n) - machine(1))):
        points = tuple((n, believed(n)) for n in (1, 2, 4, 8, 16, 32, 64, 128))
        verify = tuple((n, machine(n)) for n in (1, 2, 4, 8, 16))
        slowdowns = drive(machine, CostModel(StepCosts(verify, read=points)), 2.0, 0.03, 0.0)
        assert 1.6 <= median(slowdowns) <= 2.3


@pytest.mark.parametrize("num_decoding", [1, 3, 8, 17, 40, 100])
def test_padded_steps_are_full(num_decoding: int) -> None:
    """Also where the curve knows nothing of the buckets."""
    smooth = tuple((n, (12.0 + 0.06 * n) / 1e3) for n in (1, 64, 512))
    rule = pieces(CostModel(StepCosts(smooth, read=smooth)), BUCKETS)
    found = rule.size(Decoding(num_decoding, num_decoding), 2000)
    assert num_decoding + found in BUCKETS
    nearly = pieces(CostModel(StepCosts(smooth, read=smooth)), BUCKETS, max_slowdown=1.001)
    assert nearly.size(Decoding(15, 15), 2000) == 1


def test_until_steps_were_timed_pieces_are_small() -> None:
    costs = CostModel()
    rule = pieces(costs)
    assert rule.size(Decoding(4, 4), 500) == UNTIMED
    assert rule.size(Decoding(4, 4), 20) == 20
    assert rule.size(NOBODY, 500) == 500
    costs.observe(StepTiming(Decoding(4, 4), 0.010, 0.0))
    assert rule.size(Decoding(4, 4), 500) == UNTIMED  # one size says nothing about others
    costs.observe(StepTiming(NOBODY, 0.5, 0.0, reading=Reading(500)))
    assert 5 <= rule.size(Decoding(4, 4), 500) <= 15


def test_prompts_alone_are_read_as_fast_as_they_can_be() -> None:
    assert pieces(calibrated(MACHINES["flat"])).size(NOBODY, 2048) == 2048
    assert pieces(calibrated(MACHINES["cpu"])).size(NOBODY, 512) == 512
    assert pieces(calibrated(MACHINES["knee"])).size(NOBODY, 512) == 65  # beyond it a token takes longer
    slower = calibrated(lambda n: (4.0 + n) / 1e3 * (1.0 if n <= 128 else 1.5))
    assert pieces(slower).size(NOBODY, 512) == 128
    unknown = calibrated(MACHINES["knee"], 64)
    assert pieces(unknown).size(NOBODY, 512) == 512  # to see how fast that is
    slightly = calibrated(lambda n: n / 1e3 * (1.0 if n <= 128 else 1.02))
    assert pieces(slightly).size(NOBODY, 512) == 512


def test_no_verdict_on_large_pieces_is_final() -> None:
    machine = MACHINES["cpu"]
    costs = calibrated(machine, 64)
    costs.observe(StepTiming(NOBODY, 5.0 * machine(512), 0.0, reading=Reading(512)))  # a hiccup
    rule = pieces(costs)
    assert rule.size(NOBODY, 512) < 512
    for _ in range(300):
        piece = rule.size(NOBODY, 512)
        costs.observe(StepTiming(NOBODY, machine(piece), 0.0, reading=Reading(piece)))
    assert rule.size(NOBODY, 512) == 512


def test_the_step_budget_bounds_pieces_beside_streams() -> None:
    rule = pieces(calibrated(MACHINES["flat"]), max_step_tokens=100)
    assert rule.size(Decoding(8, 8), 2000) == 92
    assert rule.size(Decoding(8, 8), 30) == 30
    assert rule.size(Decoding(8, 8), 0) == 0


def test_the_factor_is_checked() -> None:
    for wrong in (0.9, -1, float("nan"), "2"):
        with pytest.raises(ConfigError, match="max_slowdown"):
            EngineConfig(max_slowdown=wrong)  # type: ignore[arg-type]


# Through the scheduler.


def make_harness(machine: Seconds, *, lag: int = 0, depth: int = 0, num_slots: int = 8, **config: float) -> Harness:
    info = make_info(lag=lag, num_slots=num_slots, num_blocks=4000, max_context=8000)
    runner = FakeRunner(info, verify=machine, draft=lambda rows: 0.0005, hit=0.7)
    costs = CostModel(runner.calibrate(range(1, 100), range(1, 9)))
    settings = EngineConfig(max_streams=num_slots, **config)  # type: ignore[arg-type]
    policy = Fixed(depth) if depth else Off("test")
    return Harness(Scheduler(info, policy, settings, clock=lambda: 5.0, costs=costs), runner)


def fed(harness: Harness, slot: int) -> list[int]:
    """Tokens of a row, step by step."""
    return [sum(row.feed for row in plan.rows if row.slot == slot) for plan in harness.runner.plans]


def slot_of(harness: Harness, prompt: tuple[int, ...]) -> int:
    joins = (join for plan in harness.runner.plans for join in plan.joins)
    return next(join.slot for join in joins if join.tokens[: len(prompt)] == prompt)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(97) for _ in range(length))


def decode(harness: Harness, count: int) -> None:
    for i in range(count):
        harness.add(make_request(f"stream{i}", prompt_of(i, 5), max_tokens=4000))
    for _ in range(12):
        harness.step()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", MACHINES)
def test_streams_keep_their_pace_while_a_prompt_is_read(name: str, lag: int, depth: int) -> None:
    machine = MACHINES[name]
    harness = make_harness(machine, lag=lag, depth=depth)
    decode(harness, 4)
    guest = prompt_of(99, 1000)
    harness.add(make_request("guest", guest, max_tokens=1))
    first = len(harness.runner.plans)
    while "guest" not in harness.finals:
        harness.step()
    plans = harness.runner.plans[first:]
    feeds = [[row.feed for row in plan.rows] for plan in plans if len(plan.rows) == 5]
    assert sum(feed[-1] for feed in feeds) >= 1000
    for *decoding, piece in feeds:
        num_decoding = sum(decoding)
        undisturbed = machine(num_decoding) + 0.0005 * depth
        assert machine(num_decoding + piece) + 0.0005 * depth <= 2.1 * undisturbed
    assert harness.tokens["guest"] == list(continuation(guest, 1, 97, 1))


class Spy(Fixed):
    def __init__(self) -> None:
        super().__init__(2)
        self.loads: list[Load] = []

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        self.loads.append(load)
        return super().decide(rows, load)


def test_pieces_give_way_to_drafts_so_they_are_no_load_for_them() -> None:
    """A piece ends where a stair begins. If its tokens counted, any further draft would seem to cost the next stair."""
    info = make_info(num_slots=8, num_blocks=4000, max_context=8000, step_sizes=BUCKETS)
    runner = FakeRunner(info, verify=stairs, draft=lambda rows: 0.0003)
    costs, spy = CostModel(runner.calibrate(range(1, 600), range(1, 9))), Spy()
    harness = Harness(Scheduler(info, spy, EngineConfig(), clock=lambda: 5.0, costs=costs), runner)
    harness.add(make_request("guest", prompt_of(99, 7000), max_tokens=1))
    harness.step()
    decode(harness, 4)
    assert "guest" not in harness.finals
    feeds = [[row.feed for row in plan.rows] for plan in runner.plans[6:]]
    assert all(feed in ([3, 3, 3, 3, 244], [3, 3, 3, 3]) for feed in feeds)  # some steps read nothing
    assert sum(len(feed) == 5 for feed in feeds) > 0.7 * len(feeds)
    assert {load.num_other_tokens for load in spy.loads} == {0}
    rows, policy = [SamplingRow(str(i), 3) for i in range(4)], Adaptive(3, costs)
    for i in range(400):  # a third of the first drafts is right
        policy.observe_row(str(i % 4), 3, int(i % 3 == 0))
    alone, counted = (policy.decide(rows, Load(4, num_other_tokens=n))[0].depth for n in (0, 252))
    assert counted == 0 < alone


def test_a_short_prompt_passes_a_long_one_that_keeps_half() -> None:
    harness = make_harness(MACHINES["cpu"])
    decode(harness, 2)
    long, short = prompt_of(1, 3000), prompt_of(2, 40)
    harness.add(make_request("long", long, max_tokens=1))
    for _ in range(5):
        harness.step()
    alone = fed(harness, slot_of(harness, long))[-1]
    first = len(harness.runner.plans)
    harness.add(make_request("short", short, max_tokens=1))
    while "short" not in harness.finals:
        harness.step()
    assert "long" not in harness.finals
    feeds = fed(harness, slot_of(harness, long))[first:]
    assert all(feed >= alone // 2 - 1 for feed in feeds if feed)  # some steps read nothing
    assert len(feeds) <= -(-40 // (alone // 2)) + 3


def test_equal_prompts_are_read_one_after_the_other() -> None:
    """To read them all at once would only delay the first."""
    harness = make_harness(MACHINES["cpu"])
    decode(harness, 2)
    for seed in (1, 2, 3):
        harness.add(make_request(f"guest{seed}", prompt_of(seed, 200), max_tokens=1))
    order: list[str] = []
    while len(order) < 3:
        harness.step()
        order += [key for key in harness.finals if key.startswith("guest") and key not in order]
    assert order == ["guest1", "guest2", "guest3"]
    slots = [slot_of(harness, prompt_of(seed, 200)) for seed in (1, 2, 3)]
    overlaps = sum(sum(bool(feed) for feed in step) > 1 for step in zip(*(fed(harness, slot) for slot in set(slots))))
    assert overlaps <= 3


def test_nobody_starves_beside_a_flow_of_short_prompts() -> None:
    harness = make_harness(MACHINES["cpu"], num_slots=4)
    decode(harness, 1)
    harness.add(make_request("long", prompt_of(1, 600), max_tokens=1, client="a"))
    count = 0
    while "long" not in harness.finals:
        while count - sum(key.startswith("short") for key in harness.finals) < 3:
            count += 1
            harness.add(make_request(f"short{count}", prompt_of(1000 + count, 20), max_tokens=1, client="b"))
        harness.step()
        assert len(harness.runner.plans) < 600
    assert count > 10  # and the short ones did not wait for it
