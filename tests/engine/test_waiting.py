"""The waiting line: clients take turns, each in its own order, and who was preempted comes first."""

from __future__ import annotations

from collections import defaultdict

from fakes import FakeRunner, Harness, make_info, make_request
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.request import Request, Sequence
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.waiting import RoundRobin, WaitingLine
from slipstream.speculate.policy import Fixed

CLIENTS = "abcde"


def request(key: str, client: str) -> Request:
    made = make_request(key, max_tokens=3)
    return Request(made.id, made.prompt_tokens, made.params, 1, client=client)


@given(st.lists(st.sampled_from([*CLIENTS, "take", "take"]), max_size=60))
def test_no_client_waits_for_more_than_a_turn_of_each_other(moves: list[str]) -> None:
    line: RoundRobin[int] = RoundRobin()
    waiting: dict[str, list[int]] = defaultdict(list)
    others_since: dict[str, list[str]] = {}  # by waiting client: whose turns came since it began to wait
    for number, move in enumerate(moves):
        if move != "take":
            line.add(move, number)
            waiting[move].append(number)
            others_since.setdefault(move, [])
        elif len(line):
            [taken] = line.take()
            [client] = [each for each in CLIENTS if taken in waiting[each]]
            assert waiting[client].pop(0) == taken, "first come, first served within a client"
            for since in others_since.values():
                since.append(client)
            turns = others_since.pop(client)[:-1]
            assert len(set(turns)) == len(turns), f"{client} waited for two turns of another: {turns}"
            assert client not in turns
            if waiting[client]:
                others_since[client] = []
    assert len(line) == sum(map(len, waiting.values()))


def test_with_k_clients_each_has_every_kth_start() -> None:
    """Through the scheduler, with one slot: the order of the joins is the order of the turns."""
    runner = FakeRunner(make_info(num_slots=1))
    harness = Harness(Scheduler(runner.info, Fixed(0), EngineConfig(max_streams=1)), runner)
    for i in range(6):
        harness.add(request(f"a{i}", "a"))
    for i in range(2):
        harness.add(request(f"b{i}", "b"))
    harness.add(request("c0", "c"))
    order: list[str] = []
    while harness.scheduler.has_work:
        harness.step()
        order += [each.id for each in harness.scheduler.streams() if each.id not in order]
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_preempted_sequences_come_first_and_in_their_order() -> None:
    line = WaitingLine()
    old, young, new = (Sequence(request(key, key), 10) for key in ("old", "young", "new"))
    line.add(new)
    line.put_back(young)
    line.put_back(old)
    assert len(line) == 3
    seen = []
    for _ in range(3):
        seen += line.first_group()
        line.take(line.first_group())
    assert seen == [old, young, new]


def test_whoever_leaves_the_line_is_gone() -> None:
    line = WaitingLine()
    first, second, back = (Sequence(request(key, "a"), 10) for key in ("1", "2", "3"))
    line.add(first)
    line.add(second)
    line.put_back(back)
    for each in (back, first):
        line.remove(each)
    assert line.first_group() == [second]
    line.remove(second)
    assert len(line) == 0
