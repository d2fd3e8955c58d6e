"""How prompts share a piece: as numbers, and through the scheduler."""

from __future__ import annotations

import random

import pytest
from fakes import FakeRunner, Harness, make_info, make_request
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.prompt_pieces import share_by_length, share_evenly
from slipstream.engine.scheduler import Scheduler
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import Off

LEFTS = st.lists(st.integers(2, 5000), max_size=8)


@pytest.mark.parametrize(
    ("piece", "lefts", "next_left", "shares"),
    [
        (100, [300], None, [100]),
        (100, [30], None, [30]),
        (100, [300, 300, 300], None, [100, 0, 0]),  # equal ones: one after the other
        (100, [300, 40], None, [60, 40]),
        (100, [300, 200], None, [50, 50]),
        (100, [300, 200, 10], None, [50, 40, 10]),
        (101, [300, 200], None, [51, 50]),
        (100, [300], 20, [80]),  # the rest is for the one to be admitted
        (100, [300], 299, [50]),
        (100, [300], 300, [100]),
        (100, [300, 20], 30, [50, 20]),
        (100, [300, 40], 30, [50, 20]),
        (1, [300, 40], None, [1, 0]),
        (0, [300, 40], 5, [0, 0]),
        (100, [], 5, []),
    ],
)
def test_by_length(piece: int, lefts: list[int], next_left: int | None, shares: list[int]) -> None:
    assert share_by_length(piece, lefts, next_left) == shares


@pytest.mark.parametrize(
    ("piece", "lefts", "num_waiting", "expected"),
    [
        (512, [], 8, ([], 64)),
        (512, [1000, 1000], 0, ([256, 256], 0)),
        (512, [1000, 12], 0, ([500, 12], 0)),
        (512, [1000, 12], 1, ([250, 12], 250)),
        (10, [50, 50, 50], 0, ([4, 3, 3], 0)),
        (2, [50, 50, 50], 1, ([1, 1, 0], 0)),
    ],
)
def test_evenly(piece: int, lefts: list[int], num_waiting: int, expected: tuple[list[int], int]) -> None:
    assert share_evenly(piece, lefts, num_waiting) == expected


@given(st.integers(0, 2048), LEFTS, st.none() | st.integers(2, 5000), st.integers(0, 8))
def test_no_more_than_there_is_and_the_oldest_never_starves(
    piece: int, lefts: list[int], next_left: int | None, num_waiting: int
) -> None:
    for shares in (share_by_length(piece, lefts, next_left), share_evenly(piece, lefts, num_waiting)[0]):
        assert sum(shares) <= piece
        assert all(0 <= share <= left for share, left in zip(shares, lefts))
    if lefts:
        assert share_by_length(piece, lefts, next_left)[0] >= min(lefts[0], piece // 2)
        assert sum(share_by_length(piece, lefts, None)) == min(piece, sum(lefts))


def burst(per_token: float, lengths: list[int], num_blocks: int = 4000) -> Harness:
    info = make_info(num_slots=8, num_blocks=num_blocks, max_context=8000)
    runner = FakeRunner(info, verify=lambda n: 0.010 + per_token * n)
    costs = CostModel(runner.calibrate(range(1, 50), range(1, 9)))
    config = EngineConfig(max_streams=8)
    harness = Harness(Scheduler(info, Off("test"), config, clock=lambda: 5.0, costs=costs), runner)
    for i, length in enumerate(lengths):
        prompt = [random.Random(i).randrange(97) for _ in range(length)]
        harness.add(make_request(f"r{i}", prompt, max_tokens=30))
    return harness


def first_steps(harness: Harness) -> list[int]:
    """In which step each request had its first token."""
    found: dict[str, int] = {}
    step = 0
    while harness.scheduler.has_work:
        harness.step()
        step += 1
        for event in harness.events:
            found.setdefault(event.request_id, step)
    return [found[f"r{i}"] for i in range(len(found))]


def test_prompts_end_together_where_the_first_would_slow_the_others_down() -> None:
    assert first_steps(burst(0.002, [300] * 4)) == [3] * 4  # 1,200 tokens, 512 a step


def test_prompts_end_one_after_the_other_where_it_costs_nothing() -> None:
    steps = first_steps(burst(0.00002, [300] * 4))
    assert steps == [1, 2, 2, 3]  # 512 tokens in the first step, then beside streams


def test_what_those_who_cannot_be_admitted_leave_goes_to_the_others() -> None:
    """Four prompts and blocks for two of them; the room of the step is used up all the same."""
    harness = burst(0.002, [300] * 4, num_blocks=170)
    plan = harness.step()
    assert plan is not None
    assert [row.feed for row in plan.rows] == [300, 212]
    harness.run()
    assert len(harness.finals) == 4


def test_the_order_of_turns_stays() -> None:
    """A short prompt may pass one that is being read, but nobody who came before it to the line."""
    harness = burst(0.00002, [2000])
    harness.step()
    for name, length, client in (("a1", 900, "a"), ("a2", 10, "a"), ("b1", 800, "b"), ("b2", 10, "b")):
        prompt = [random.Random(name).randrange(97) for _ in range(length)]
        harness.add(make_request(name, prompt, max_tokens=200, client=client))
    joined: list[int] = []
    while len(joined) < 4:
        plan = harness.step()
        assert plan is not None
        joined += [len(join.tokens) for join in plan.joins]
    assert joined == [900, 800, 10, 10]
