"""How large pieces of prompts are: by the cost of steps on simulated machines, whatever was learned from timings."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import pytest
from fakes import make_info
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.contract import StepCosts
from slipstream.engine.prompt_pieces import DEFAULT_PIECE, SMALL, WASTE, PromptPieces
from slipstream.errors import ConfigError
from slipstream.speculate.cost_model import CostModel, Decoding, StepTiming

Seconds = Callable[[int], float]
Points = tuple[tuple[int, float], ...]
NOBODY = Decoding(0, 0)
BUCKETS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 2048)
READ_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 512)  # as CUDA's calibration has them, like the next
LARGE_READ_SIZES = (1024, 2048)


def stairs(num_tokens: int) -> float:
    """256 tokens take 1.6 times as long as one, as with a 27B model on an H200. The rest is made up: steps are padded,
    few tokens cost next to nothing, and from 256 on each costs the same."""
    share = BUCKETS[bisect_left(BUCKETS, num_tokens)] / 256
    return 0.0139 * max(1.0 + 0.6 * share, 1.6 * share)


MACHINES: dict[str, Seconds] = {
    "cpu": lambda n: (1.5 + 0.75 * n) / 1e3,  # the default model on two cores, about
    "large": lambda n: (60.0 + 4.0 * max(0, n - 6)) / 1e3,  # a model whose weights take longer to read than few tokens
    "flat": lambda n: (10.0 + 0.01 * n) / 1e3,
    "knee": lambda n: (10.0 + 0.01 * n + 0.3 * max(0, n - 64)) / 1e3,
    "stairs": stairs,
}


def points_of(machine: Seconds, noise: float = 0.0) -> Points:
    """As calibration times them."""
    dice = random.Random(2)
    on_host = machine in (MACHINES["cpu"], MACHINES["large"])
    sizes = (1, 4, 8, 16, 32, 64) if on_host else (1, *READ_SIZES)
    timed = [(n, machine(n) * dice.gauss(1.0, noise)) for n in sizes]
    if machine is stairs:  # both ends of each stair
        pairs = [[(before + 1, seconds), (n, seconds)] for (before, _), (n, seconds) in pairwise(timed)]
        large = [(n, machine(n)) for n in LARGE_READ_SIZES]
        timed = [timed[0], *(point for pair in pairs for point in pair), *large]
    return tuple((n, max(seconds for m, seconds in timed if m <= n)) for n, _ in timed)


def calibrated(machine: Seconds, noise: float = 0.0) -> CostModel:
    points = points_of(machine, noise)
    verify = tuple((n, machine(n)) for n in (1, 2, 4, 8, 16, 40, 80))
    return CostModel(StepCosts(verify, read=points))


def pieces(costs: CostModel, machine: Seconds | None = None, *, apart: bool = False, **config: float) -> PromptPieces:
    info = make_info(step_sizes=BUCKETS if machine is stairs else (), prompts_apart=apart)
    return PromptPieces(info, EngineConfig(**config), costs)  # type: ignore[arg-type]


def largest_within(machine: Seconds, num_decoding: int, seconds: float, budget: int = 512) -> int:
    fitting = [n for n in range(1, budget - num_decoding + 1) if machine(num_decoding + n) <= seconds]
    return max(fitting, default=1)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 60])
def test_the_largest_piece_within_the_factor(name: str, factor: float, num_rows: int) -> None:
    """Or the smallest that wastes nothing, and that is small on these machines."""
    machine = MACHINES[name]
    points = tuple((n, machine(n)) for n in sorted({1, 6, *BUCKETS[:-1], *(n + 1 for n in BUCKETS[:-1])}))
    found = pieces(CostModel(StepCosts(points, read=points)), machine, max_slowdown=factor)
    piece = found.size(Decoding(num_rows, num_rows), 2000)
    expected = largest_within(machine, num_rows, factor * machine(num_rows))
    assert piece == pytest.approx(expected, rel=0.02, abs=1) or expected < piece <= 64
    assert machine(num_rows + piece) <= 1.02 * factor * machine(num_rows) or piece <= 64


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("num_rows", [1, 4, 8, 16])
def test_no_piece_wastes_time(name: str, num_rows: int) -> None:
    """Even where the factor allows nothing, tokens are read nearly as fast as they can be."""
    machine = MACHINES[name]
    piece = pieces(calibrated(machine), machine, max_slowdown=1.0).size(Decoding(num_rows, num_rows), 512)

    def each(count: int) -> float:
        return (machine(num_rows + count) - machine(num_rows)) / count

    assert each(piece) <= 1.1 * WASTE * min(each(count) for count in SMALL)
    assert piece <= 64


def test_a_forward_of_their_own_makes_pieces_larger() -> None:
    """A pass reads all weights once more, for one token as for 32: to read a few at a time would be a waste."""

    def apart(num_tokens: int) -> float:
        return (20.0 + 0.3 * num_tokens) / 1e3

    points = tuple((n, apart(n)) for n in (1, 4, 8, 16, 32, 64))
    costs = CostModel(StepCosts(points, read=points))
    piece = pieces(costs, apart=True).size(Decoding(1, 1), 512)
    assert 32 <= piece <= 64
    assert apart(1) + apart(piece) <= 3.0 * apart(1)
    assert pieces(costs, apart=True, max_slowdown=5.0).size(Decoding(1, 1), 512) == 132  # 81.2 ms, 64 in 39.2 ms


def test_drafts_and_contexts_are_part_of_the_undisturbed_step() -> None:
    points = tuple((n, (4.0 + 1.1 * n) / 1e3) for n in (1, 8, 64, 512))
    costs = CostModel(StepCosts(points, ((1, 0.004), (8, 0.004)), context=1e-6, read=points, read_context=(1e-8, 1e-7)))
    rule = pieces(costs)
    alone = rule.size(Decoding(4, 4), 512)
    assert rule.size(Decoding(4, 4, context=11_000), 512) == alone + 10  # 11 ms more that it may add
    assert rule.size(Decoding(4, 4, pass_rows=(4, 4)), 512) == alone + 7
    assert rule.size(Decoding(8, 4), 512) == alone + 4
    assert rule.size(Decoding(4, 4), 512, num_before=5000) == 5  # 8.3 = 0.05 + 5 x (1.1 + 0.5), and 0.25


Timing = tuple[int, float, float, float]  # tokens, seconds of verification, of drafts, of all else
TIMINGS = st.lists(
    st.tuples(st.integers(1, 80), *[st.floats(0.0, 100.0)] * 3), max_size=60
)  # of a machine that nobody would believe


@settings(max_examples=200)
@given(st.sampled_from(sorted(MACHINES)), TIMINGS, st.integers(1, 40), st.floats(1.0, 5.0))
def test_whatever_steps_took_no_piece_is_smaller_than_calibration_says(
    name: str, timings: list[Timing], num_rows: int, factor: float
) -> None:
    """What was learned scales both sides: prompts cannot starve. Drafts and other time make pieces larger only."""
    machine, rows = MACHINES[name], Decoding(num_rows, num_rows)
    costs = calibrated(machine)
    rule = pieces(costs, machine, max_slowdown=factor)
    at_first = rule.size(rows, 400)
    for num_tokens, verify, draft, other in timings:
        costs.observe(StepTiming(Decoding(num_tokens, num_tokens, pass_rows=(1,)), verify, draft, other))
    assert rule.size(rows, 400) >= at_first - 1 > 0 or at_first == 1


class Weather:
    """How many times as long steps take from one moment to the next: slow times, noise and hiccups."""

    def __init__(self, seed: int, worst: float, noise: float = 0.05, hiccups: float = 0.01) -> None:
        self._dice, self._worst, self._noise, self._hiccups = random.Random(seed), worst, noise, hiccups
        self._level = 1.0

    def __call__(self) -> float:
        if self._dice.random() < 0.02:
            self._level = self._dice.uniform(1.0, self._worst)
        hiccup = 10.0 if self._dice.random() < self._hiccups else 1.0
        return self._level * hiccup * max(0.5, self._dice.gauss(1.0, self._noise))


def drive(machine: Seconds, costs: CostModel, weather: Weather, num_steps: int = 600) -> Iterator[int]:
    """The pieces that are read. Eight streams decode, and now and then prompts come, some of them long."""
    rule, rows, dice = pieces(costs, machine), Decoding(8, 8), random.Random(1)
    left = 0
    for _ in range(num_steps):
        if not left and dice.random() < 0.1:
            left = dice.choice((20, 300, 20_000))
        if left:
            piece = rule.size(rows, 504)
            left = max(0, left - piece)
            yield piece
        slower = weather()
        if not left:  # steps that read teach nothing
            costs.observe(StepTiming(rows, slower * machine(8), 0.0))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_factor_holds_on_a_steady_machine(name: str, noise: float) -> None:
    """``noise``: of calibration. Then steps are off by as much."""
    machine = MACHINES[name]
    found = [machine(8 + piece) / machine(8) for piece in drive(machine, calibrated(machine, noise), Weather(1, 1.0))]
    possible = machine(8 + largest_within(machine, 8, 2.0 * machine(8))) / machine(8)
    assert max(found) <= 2.05 + 3 * noise
    assert median(found) - 1.0 >= (0.7 - 2 * noise) * (possible - 1.0)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("worst", [2.0, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_machine_of_changing_speed_goes_on_reading(name: str, worst: float, seed: int) -> None:
    machine = MACHINES[name]
    found = list(drive(machine, calibrated(machine), Weather(seed, worst)))
    at_first = pieces(calibrated(machine), machine).size(Decoding(8, 8), 504)
    assert min(found) >= at_first - 1
    assert max(found) <= 1.05 * at_first + 1


@pytest.mark.parametrize(
    ("machine", "num_earlier", "expected"),
    [("stairs", 1, 2048 - 8), ("stairs", 7, 2048 - 8), ("large", 1, 64), ("large", 7, 448), ("cpu", 3, 192)],
)
def test_prompts_of_a_burst_are_read_at_full_speed(machine: str, num_earlier: int, expected: int) -> None:
    """Where a step costs much besides, in many tokens; where each costs as much in the end, in no more than 64 each."""
    rule, rows = pieces(calibrated(MACHINES[machine]), MACHINES[machine]), Decoding(8, 8)
    budget = 2048 if machine == "stairs" else 512
    assert rule.size(rows, budget - 8, num_earlier=num_earlier) == expected
    assert rule.size(rows, budget - 8) < expected


def test_no_piece_of_a_burst_is_larger_than_what_was_timed_as_faster() -> None:
    """On a slower GPU 512 tokens may be the most: then there is no reason for longer pauses."""
    points = tuple((n, 0.02 + 0.8e-3 * n) for n in (16, 64, 256, 512))
    rule = pieces(CostModel(StepCosts(points, read=points)))
    assert rule.size(Decoding(4, 4), 2000, num_earlier=1) == 512
    assert rule.size(Decoding(4, 4), 2000, num_earlier=32) == 512
    assert rule.size(Decoding(4, 4), 100, num_earlier=12) == 100


@pytest.mark.parametrize("num_decoding", [1, 3, 8, 17, 40, 100])
@pytest.mark.parametrize("factor", [1.001, 1.5, 3.0])
def test_padded_steps_are_full(num_decoding: int, factor: float) -> None:
    """Also where the curve knows nothing of the buckets."""
    smooth = tuple((n, (12.0 + 0.06 * n) / 1e3) for n in (1, 64, 512))
    rule = pieces(CostModel(StepCosts(smooth, read=smooth)), stairs, max_slowdown=factor)
    assert num_decoding + rule.size(Decoding(num_decoding, num_decoding), 2000) in BUCKETS


def test_where_reading_was_not_timed_pieces_are_as_they_always_were() -> None:
    costs = CostModel()
    rule = pieces(costs)
    assert rule.size(Decoding(4, 4), 500) == DEFAULT_PIECE
    costs.observe(StepTiming(Decoding(4, 4), 0.010, 0.0))
    assert rule.size(Decoding(4, 4), 500) == DEFAULT_PIECE
    assert rule.size(Decoding(4, 4), 20) == 20
    assert rule.size(Decoding(4, 4), 2000, num_earlier=32) == 508  # 512 with those that decode
    one_size = CostModel(StepCosts(((1, 0.01), (8, 0.02)), read=((1, 0.01),)))
    assert pieces(one_size).size(Decoding(4, 4), 500) == DEFAULT_PIECE


def test_prompts_that_came_before_the_rows_began_have_a_piece_each() -> None:
    rule = pieces(calibrated(MACHINES["cpu"]))
    by_cost = rule.size(Decoding(4, 4), 508)
    assert by_cost < DEFAULT_PIECE
    found = [rule.size(Decoding(4, 4), 508, num_earlier=n) for n in (0, 1, 3, 20)]
    assert found == [by_cost, DEFAULT_PIECE, 3 * DEFAULT_PIECE, 508]
    assert pieces(CostModel()).size(Decoding(4, 4), 508, num_earlier=3) == 3 * DEFAULT_PIECE


def test_where_nobody_decodes_the_budget_is_read() -> None:
    for costs in (CostModel(), calibrated(MACHINES["cpu"])):
        assert pieces(costs).size(NOBODY, 2048) == 2048


def test_the_step_budget_bounds_pieces_beside_streams() -> None:
    rule = pieces(calibrated(MACHINES["flat"]), max_step_tokens=100)
    assert rule.size(Decoding(8, 8), 2000) == 92
    assert rule.size(Decoding(8, 8), 30) == 30
    assert rule.size(Decoding(8, 8), 0) == 0


def test_the_factor_is_checked() -> None:
    for wrong in (0.9, -1, float("nan"), "2"):
        with pytest.raises(ConfigError, match="max_slowdown"):
            EngineConfig(max_slowdown=wrong)  # type: ignore[arg-type]
