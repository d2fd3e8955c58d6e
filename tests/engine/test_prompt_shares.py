"""Prompts beside streams, and beside each other, through the scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fakes import FakeRunner, Harness, continuation, make_info, make_request
from hypothesis import given
from hypothesis import strategies as st
from test_prompt_pieces import BUCKETS, MACHINES, Seconds, points_of, stairs

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.engine.prompt_pieces import share
from slipstream.engine.scheduler import Scheduler
from slipstream.speculate.adaptive import Adaptive
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import DepthPolicy, Fixed, Load, Off, SamplingRow

DRAFT = 0.0005  # seconds of a draft pass


@pytest.mark.parametrize(
    ("piece", "lefts", "shares"),
    [
        (100, [300], [100]),
        (100, [30], [30]),
        (100, [300, 300, 300], [100, 0, 0]),  # equal ones: one after the other
        (100, [300, 40], [60, 40]),
        (100, [300, 200], [50, 50]),
        (100, [300, 200, 10], [50, 40, 10]),
        (101, [300, 200], [51, 50]),
        (1, [300, 40], [1, 0]),
        (0, [300, 40], [0, 0]),
        (100, [], []),
    ],
)
def test_shares(piece: int, lefts: list[int], shares: list[int]) -> None:
    assert share(piece, lefts) == shares


@given(st.integers(0, 2048), st.lists(st.integers(2, 5000), min_size=1, max_size=8))
def test_all_is_shared_and_the_oldest_never_starves(piece: int, lefts: list[int]) -> None:
    shares = share(piece, lefts)
    assert sum(shares) == min(piece, sum(lefts))
    assert all(0 <= each <= left for each, left in zip(shares, lefts, strict=True))
    assert shares[0] >= min(lefts[0], piece // 2)


def make_harness(
    machine: Seconds,
    *,
    lag: int = 0,
    policy: DepthPolicy | None = None,
    num_slots: int = 8,
    num_blocks: int = 2000,
    **config: float,
) -> Harness:
    padded = {"step_sizes": BUCKETS, "prompt_tokens": 2048, "block_size": 64} if machine is stairs else {}
    info = make_info(lag=lag, num_slots=num_slots, num_blocks=num_blocks, max_context=20_000, **padded)
    runner = FakeRunner(info, verify=machine, draft=lambda rows: DRAFT, hit=0.7)
    verify = tuple((n, machine(n)) for n in range(1, 100))
    costs = CostModel(StepCosts(verify, ((1, DRAFT), (8, DRAFT)), read=points_of(machine)))
    settings = EngineConfig(max_streams=num_slots, **config)  # type: ignore[arg-type]
    return Harness(Scheduler(info, policy or Off("test"), settings, clock=lambda: 5.0, costs=costs), runner)


def fed(harness: Harness, slot: int) -> list[int]:
    """Tokens of a row, step by step."""
    return [sum(row.feed for row in plan.rows if row.slot == slot) for plan in harness.runner.plans]


def slot_of(harness: Harness, prompt: tuple[int, ...]) -> int:
    joins = (join for plan in harness.runner.plans for join in plan.joins)
    return next(join.slot for join in joins if join.tokens[: len(prompt)] == prompt)


def prompt_of(seed: int | str, length: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(97) for _ in range(length))


def decode(harness: Harness, count: int) -> None:
    for i in range(count):
        harness.add(make_request(f"stream{i}", prompt_of(i, 5), max_tokens=4000))
    for _ in range(12):
        harness.step()


def read_beside(harness: Harness, num_streams: int, prompt: tuple[int, ...]) -> list[list[int]]:
    """The tokens of each row in steps that read the prompt, which comes last."""
    decode(harness, num_streams)
    harness.add(make_request("guest", prompt, max_tokens=1))
    first = len(harness.runner.plans)
    while "guest" not in harness.finals:
        harness.step()
    rows = [[row.feed for row in plan.rows] for plan in harness.runner.plans[first:]]
    return [feeds for feeds in rows if len(feeds) == num_streams + 1]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", MACHINES)
def test_streams_keep_their_pace_while_a_prompt_is_read(name: str, lag: int, depth: int) -> None:
    machine, guest = MACHINES[name], prompt_of(99, 1000)
    harness = make_harness(machine, lag=lag, policy=Fixed(depth) if depth else None)
    feeds = read_beside(harness, 4, guest)
    assert sum(feed[-1] for feed in feeds) >= 1000
    for *decoding, piece in feeds:
        num_decoding, drafting = sum(decoding), DRAFT * depth
        assert machine(num_decoding + piece) + drafting <= 2.05 * (machine(num_decoding) + drafting)
    assert harness.tokens["guest"] == list(continuation(guest, 1, 97, 1))


def test_a_machine_that_slows_down_while_a_prompt_is_read_reads_on() -> None:
    """It once seemed to read ever more slowly, and pieces shrank to single tokens."""
    slower = 1.0
    harness = make_harness(lambda n: slower * MACHINES["cpu"](n))
    decode(harness, 4)
    costs, drift = harness.scheduler._costs, harness.scheduler._costs.drift(4)
    slower = 10.0
    harness.add(make_request("guest", prompt_of(99, 600), max_tokens=1))
    pieces = []
    while "guest" not in harness.finals:
        plan = harness.step()
        assert plan is not None
        pieces += [row.feed for row in plan.rows[4:]]
    assert set(pieces[:-1]) == {pieces[0]}
    assert pieces[0] > 4
    assert costs.drift(4) == drift  # nor does it change what decoding is thought to cost


def test_a_long_prompt_beside_eight_streams_on_a_machine_like_an_h200() -> None:
    """Steps end where padding would begin, and read nearly five times the 64 tokens that they once did."""
    feeds = read_beside(make_harness(stairs, num_slots=16), 8, prompt_of(99, 16_384))
    assert {sum(feed) for feed in feeds[:-1]} == {320}
    assert stairs(320) <= 2.0 * stairs(8)
    seconds = sum(stairs(sum(feed)) for feed in feeds)
    assert seconds < 0.45 * -(-16_384 // 64) * stairs(8 + 64)


def test_eight_long_prompts_at_once_on_a_machine_like_an_h200() -> None:
    """All are read in the largest steps: those that decode already came with those that wait."""
    harness = make_harness(stairs)
    for i in range(8):
        harness.add(make_request(f"r{i}", prompt_of(i, 8192), max_tokens=4000))
    while not all(harness.tokens.values()):
        harness.step()
    feeds = [sum(row.feed for row in plan.rows) for plan in harness.runner.plans]
    assert set(feeds[:-1]) == {2048}
    assert len(feeds) == 33  # 32, and the tokens that streams decoded beside


def test_a_stream_is_protected_from_all_that_came_after_its_first_token() -> None:
    harness = make_harness(stairs)
    for i in range(5):
        harness.add(make_request(f"r{i}", prompt_of(i, 8192), max_tokens=4000))
        while i in (1, 4) and not all(harness.tokens.values()):  # a burst of two, and one of three
            harness.step()
    feeds = [[row.feed for row in plan.rows] for plan in harness.runner.plans]
    later = [i for i, rows in enumerate(feeds) if len(rows) > 2]
    assert {sum(rows) for rows in feeds[: later[0] - 1]} <= {2048, 9, 2}
    assert {sum(feeds[i]) for i in later[:-1]} == {320}  # twice the step of two


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_a_preempted_stream_reads_its_text_again_beside_those_that_came_with_it(num_waiting: int) -> None:
    """It had its first tokens already, and those that go on keep their pace. ``num_waiting``: prompts that came with
    them, and that there is no room for."""
    harness = make_harness(stairs, prefix_cache=False, num_blocks=320)
    for i in range(2 + num_waiting):
        harness.add(make_request(f"r{i}", prompt_of(i, 8192), max_tokens=4000))
    while not all(harness.tokens[f"r{i}"] for i in range(2)):
        harness.step()
    scheduler = harness.scheduler
    first = len(harness.runner.plans)
    scheduler._preempt(scheduler._running[-1])
    while len(scheduler._running) < 2 or scheduler._running[-1].num_computed < 8192:
        harness.step()
    sizes = [sum(row.feed for row in plan.rows) for plan in harness.runner.plans[first:]]
    assert {320} <= set(sizes[:-1]) <= {320, 1}


def test_prompts_of_a_burst_do_not_wait_for_the_first_of_it() -> None:
    """Costs are linear there: by cost alone, half of the time would go to the few that decode."""
    machine, harness = MACHINES["cpu"], make_harness(MACHINES["cpu"])
    for i in range(8):
        harness.add(make_request(f"r{i}", prompt_of(i, 128), max_tokens=4000))
    while not all(harness.tokens.values()):
        harness.step()
    plans = [[row.feed for row in plan.rows] for plan in harness.runner.plans]
    alone = 8 * 128 / 512 * machine(512)
    assert sum(machine(sum(feeds)) for feeds in plans) < 1.25 * alone


def test_streams_that_began_before_a_burst_keep_their_pace() -> None:
    machine, harness = MACHINES["cpu"], make_harness(MACHINES["cpu"])
    decode(harness, 4)
    first = len(harness.runner.plans)
    for i in range(4):
        harness.add(make_request(f"r{i}", prompt_of(100 + i, 128), max_tokens=4000))
    while not all(harness.tokens.values()):
        harness.step()
    for plan in harness.runner.plans[first:]:
        feeds = [row.feed for row in plan.rows]
        num_decoding = sum(feed for feed in feeds if feed == 1)
        assert machine(sum(feeds)) <= 2.05 * machine(num_decoding)


class Spy(Fixed):
    def __init__(self) -> None:
        super().__init__(2)
        self.loads: list[Load] = []

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        self.loads.append(load)
        return super().decide(rows, load)


def test_pieces_give_way_to_drafts_so_they_are_no_load_for_them() -> None:
    """A piece ends where a stair begins. If its tokens counted, any further draft would seem to cost the next stair."""
    spy = Spy()
    harness = make_harness(stairs, policy=spy)
    feeds = read_beside(harness, 4, prompt_of(99, 7000))
    assert [3, 3, 3, 3, 308] in feeds
    assert all(sum(feed) in BUCKETS for feed in feeds[:-1])
    assert {load.num_other_tokens for load in spy.loads} == {0}
    costs = CostModel(StepCosts(points_of(stairs), ((1, DRAFT), (8, DRAFT))))
    rows, policy = [SamplingRow(str(i), 3) for i in range(4)], Adaptive(3, costs)
    for i in range(400):  # a third of the first drafts is right
        policy.observe_row(str(i % 4), 3, int(i % 3 == 0))
    alone, counted = (policy.decide(rows, Load(4, num_other_tokens=n))[0].depth for n in (0, 252))
    assert counted == 0 < alone


def test_a_short_prompt_passes_a_long_one_that_keeps_half() -> None:
    harness = make_harness(MACHINES["cpu"])
    decode(harness, 4)
    long, short = prompt_of(1, 3000), prompt_of(2, 20)
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
    assert all(feed >= alone // 2 - 1 for feed in feeds)
    assert len(feeds) <= -(-20 // (alone // 2)) + 2


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


def test_the_order_of_turns_stays() -> None:
    """A short prompt may pass one that is being read, but nobody who came before it to the line."""
    harness = make_harness(MACHINES["flat"])
    harness.add(make_request("first", prompt_of("first", 2000), max_tokens=30))
    harness.step()
    for name, length, client in (("a1", 900, "a"), ("a2", 10, "a"), ("b1", 800, "b"), ("b2", 10, "b")):
        harness.add(make_request(name, prompt_of(name, length), max_tokens=200, client=client))
    joined: list[int] = []
    while len(joined) < 4:
        plan = harness.step()
        assert plan is not None
        joined += [len(join.tokens) for join in plan.joins]
    assert joined == [900, 800, 10, 10]
