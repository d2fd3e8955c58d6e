"""Parallel samples (n > 1): the prompt is computed once, its cache shared, and from then on each runs on its own."""

from __future__ import annotations

import pytest
from fakes import FakeRunner, Harness, continuation, make_info, make_request

from slipstream.config import EngineConfig
from slipstream.engine.contract import RowJoin
from slipstream.engine.scheduler import Scheduler
from slipstream.speculate.policy import Fixed

PROMPT = tuple(range(1, 31))
CONFIG = EngineConfig(max_streams=4, max_step_tokens=16, min_chunk=4)


def make_harness(**info: object) -> Harness:
    runner = FakeRunner(make_info(**info), hit=0.7)
    return Harness(Scheduler(runner.info, Fixed(2), CONFIG, clock=lambda: 1.0), runner)


def add_group(harness: Harness, count: int, prompt: tuple[int, ...] = PROMPT, **params: object) -> None:
    harness.add(*(make_request(str(i), prompt, seed=i, **params) for i in range(count)))


def check(harness: Harness, key: int, prompt: tuple[int, ...] = PROMPT, count: int = 16) -> None:
    assert tuple(harness.tokens[str(key)]) == continuation(prompt, key, 97, count)


def child_joins(harness: Harness) -> list[RowJoin]:
    return [join for plan in harness.runner.plans for join in plan.joins if join.start.num_computed]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_prompt", [2, 4, 5, 30])
def test_the_prompt_is_computed_once(lag: int, num_prompt: int) -> None:
    harness = make_harness(lag=lag)
    add_group(harness, 4, PROMPT[:num_prompt])
    harness.run()
    for key in range(4):
        check(harness, key, PROMPT[:num_prompt])
    # All but the last token once; the last one is where each samples its first.
    assert harness.runner.num_prompt_computed == num_prompt - 1 + 4
    assert len(child_joins(harness)) == 3


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    harness = make_harness()
    add_group(harness, 3, (5,))
    harness.run()
    assert not child_joins(harness)
    for key in range(3):
        check(harness, key, (5,))


def test_full_blocks_are_shared_and_the_last_one_is_copied() -> None:
    harness = make_harness()
    add_group(harness, 2)
    while not child_joins(harness):
        harness.step()
    start = child_joins(harness)[0].start
    assert (start.num_computed, len(start.blocks)) == (29, 8)
    assert start.copied is not None
    assert start.copied[0] not in start.blocks
    assert start.copied[1] == start.blocks[-1]
    # Two streams of 30 tokens in blocks of 4 would hold 16.
    assert harness.scheduler.snapshot().num_used_blocks < 14
    harness.run()
    assert harness.scheduler.snapshot().num_used_blocks == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("leaver", range(3))
@pytest.mark.parametrize("after", range(8))
def test_whoever_leaves_whenever_the_others_go_on(lag: int, leaver: int, after: int) -> None:
    harness = make_harness(lag=lag)
    add_group(harness, 3)
    for _ in range(after):
        harness.step()
    harness.abort(str(leaver))
    harness.run()
    for key in range(3):
        if key != leaver:
            check(harness, key)
    assert len(child_joins(harness)) >= 1
    assert harness.scheduler.snapshot().num_used_blocks == 0


def test_all_of_them_come_in_or_none() -> None:
    harness = make_harness(num_slots=4)
    for key in "ab":
        harness.add(make_request(key, max_tokens=4))
    add_group(harness, 3)
    harness.step()
    assert harness.scheduler.snapshot().num_running == 2
    harness.run()
    assert harness.runner.num_prompt_computed == 2 * 3 + 29 + 3


def test_while_a_long_prompt_is_shared_others_come_in() -> None:
    harness = make_harness()
    add_group(harness, 2)
    harness.add(make_request("late"))
    while not child_joins(harness):
        assert harness.step() is not None
    assert any(join.tokens == (1, 2, 3) for plan in harness.runner.plans for join in plan.joins)
    harness.run()
    assert tuple(harness.tokens["late"]) == continuation((1, 2, 3), 1, 97, 16)


def test_more_than_memory_holds_come_in_parts() -> None:
    harness = make_harness(num_blocks=14)
    add_group(harness, 4)
    harness.run()
    for key in range(4):
        check(harness, key)
    assert harness.scheduler.snapshot().num_used_blocks == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_preempted_children_compute_on_their_own(lag: int) -> None:
    harness = make_harness(num_blocks=20, lag=lag)
    add_group(harness, 4, max_tokens=40)
    harness.run()
    assert harness.scheduler.snapshot().num_preemptions > 0
    assert child_joins(harness)
    for key in range(4):
        check(harness, key, count=40)


def test_each_sample_gets_the_prompt_logprobs() -> None:
    harness = make_harness(lag=1)
    add_group(harness, 3, prompt_logprobs=1, logprobs=0)
    harness.run()
    for key in "012":
        assert len(harness.prompt_logprobs[key]) == len(PROMPT) - 1
        assert harness.prompt_logprobs[key] == harness.prompt_logprobs["0"]
        assert len(harness.logprobs[key]) == 16
