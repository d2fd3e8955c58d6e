"""The prefix cache in the scheduler: what later prompts start from, who waits for whom, and what a client is told.

The fake runner checks each start: blocks, state and the head's entries must be those of the prompt's own tokens. The
tests named after a cause show one way each in which such caches have been wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import FakeRunner, Harness, continuation, make_info, make_request

from slipstream.config import EngineConfig
from slipstream.engine.contract import Keep, RowStep
from slipstream.engine.request import PromptCache, Request
from slipstream.engine.scheduler import Scheduler
from slipstream.runners.host.rows import GREEDY, Row
from slipstream.sampling.params import DraftSetting
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel

SIZE = 4
LONG = tuple(i % 89 for i in range(400))


def start(
    *, recurrent: bool = True, draft: DraftSetting = 3, hit: float = 0.5, lag: int = 0, **changes: object
) -> Harness:
    values: dict[str, object] = {
        "num_blocks": 400, "block_size": SIZE, "max_context": 1000, "keep_grid": SIZE, "lag": lag,
        "num_states": 8 if recurrent else 0,
    }  # fmt: skip
    info = make_info(**(values | changes))
    config = EngineConfig(max_streams=4, max_step_tokens=100, min_chunk=8, draft=draft)
    policy = make_policy(draft, info, 3, CostModel())
    return Harness(Scheduler(info, policy, config, clock=lambda: 1.0), FakeRunner(info, hit=hit, shy=True))


def ask(key: str, prompt: Sequence[int], *, cache: PromptCache | None = None, **more: object) -> Request:
    request = make_request(key, prompt, **more)  # type: ignore[arg-type]
    return replace(request, cache=cache) if cache else request


def run(harness: Harness, *requests: Request) -> None:
    for request in requests:
        harness.add(request)
        harness.run()
        check(harness, request)


def check(harness: Harness, request: Request) -> None:
    """It got its own continuation."""
    limit = request.params.max_tokens
    assert limit is not None
    wanted = continuation(request.prompt_tokens, request.seed, 97, limit, request.end_token_ids)
    assert tuple(harness.tokens[request.id]) == wanted


def cached(harness: Harness, key: str) -> int:
    stats = harness.finals[key].stats
    assert stats is not None
    return stats.cached_tokens


def note(harness: Harness, key: str) -> str:
    stats = harness.finals[key].stats
    assert stats is not None
    return stats.cache_note


# ---- what is found ----


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_next_turn_computes_what_is_new(recurrent: bool, lag: int) -> None:
    harness = start(recurrent=recurrent, lag=lag)
    run(harness, ask("a", LONG[:203], max_tokens=150))
    told = (*LONG[:203], *harness.tokens["a"])
    run(harness, ask("b", (*told, 5, 6, 7)))
    # The newest position that a generating row kept is a multiple of 64 before its last token.
    assert cached(harness, "b") == 320
    run(harness, ask("c", (*told, 5, 6, 7, 8)))
    assert cached(harness, "c") == 352
    assert note(harness, "c") == "what follows token 353 is new"
    run(harness, ask("d", (*told, 5, 6, 7)))
    assert (cached(harness, "d"), note(harness, "d")) == (352, "")


def test_a_prompt_that_differs_starts_where_they_part() -> None:
    harness = start(recurrent=False)
    run(harness, ask("a", LONG[:100]), ask("b", (*LONG[:50], *LONG[:50])))
    assert cached(harness, "b") == 48
    assert note(harness, "b") == "differs from the cached prompt at token 50, of 100"


def test_a_recurrent_model_keeps_a_state_where_prompts_part() -> None:
    """The first that parts pays for it; it leaves a state for the next."""
    harness = start()
    run(harness, ask("a", LONG[:300]), ask("b", (*LONG[:150], 1, 2)), ask("c", (*LONG[:150], 3, 4)))
    assert [cached(harness, key) for key in "abc"] == [0, 0, 148]
    assert note(harness, "b") == "150 tokens are as before, but no state was kept before"


def test_boundaries_are_kept() -> None:
    harness = start()
    cache = PromptCache(boundaries=((103, "system"), (250, "user"), (290, "prompt")))
    run(harness, ask("a", LONG[:300], cache=cache))
    for key, length, wanted in (("b", 291, 288), ("c", 260, 248), ("d", 130, 100)):
        run(harness, ask(key, (*LONG[:length], 1, 2)))
        assert cached(harness, key) == wanted
    assert note(harness, "c") == "differs from the cached prompt at token 260, of 262"


def test_a_difference_is_named_by_its_place() -> None:
    harness = start(recurrent=False)
    run(harness, ask("a", LONG[:300]))
    cache = PromptCache(boundaries=((103, "system"), (250, "user"), (290, "prompt")))
    run(harness, ask("b", (*LONG[:50], *LONG[:250]), cache=cache), ask("c", (*LONG[:150], *LONG[:150]), cache=cache))
    assert note(harness, "b").endswith("at token 50, in the system message or the tools")
    assert note(harness, "c").endswith("at token 150, in the messages up to the last one of the user")


def test_salts_share_nothing() -> None:
    harness = start()
    run(harness, ask("a", LONG[:100], cache=PromptCache(salt="one")))
    run(harness, ask("b", LONG[:100], cache=PromptCache(salt="two")), ask("c", LONG[:100]))
    run(harness, ask("d", LONG[:100], cache=PromptCache(salt="one")))
    assert [cached(harness, key) for key in "abcd"] == [0, 0, 0, 96]
    assert note(harness, "c") == "no cached prompt begins like this one"


def test_a_request_without_cache_reads_and_leaves_nothing() -> None:
    harness = start()
    off = PromptCache(enabled=False)
    run(harness, ask("a", LONG[:100], cache=off), ask("b", LONG[:100]), ask("c", LONG[:100], cache=off))
    assert [cached(harness, key) for key in "abc"] == [0, 0, 0]
    assert note(harness, "c") == "the request asked for no cache"


def test_log_probabilities_of_a_prompt_leave_something_but_take_nothing() -> None:
    harness = start()
    run(harness, ask("a", LONG[:100], prompt_logprobs=0), ask("b", LONG[:100]), ask("c", LONG[:100], prompt_logprobs=0))
    assert [cached(harness, key) for key in "abc"] == [0, 96, 0]
    assert note(harness, "c") == "log-probabilities of the prompt need every token read"


def test_switched_off() -> None:
    harness = start(keep_grid=0)
    run(harness, ask("a", LONG[:100]), ask("b", LONG[:100]))
    assert (cached(harness, "b"), note(harness, "b")) == (0, "the prefix cache is switched off")
    assert harness.runner.num_kept == 0


def test_rows_that_do_not_draft_leave_nothing_for_those_that_do() -> None:
    """Their head was never fed."""
    harness = start()
    run(harness, ask("a", LONG[:100], draft="off"), ask("b", LONG[:100]), ask("c", LONG[:100], draft="off"))
    assert [cached(harness, key) for key in "abc"] == [0, 0, 96]
    run(harness, ask("d", (*LONG[:100], 1), draft="off"))
    assert cached(harness, "d") == 96


def test_a_cancelled_prompt_leaves_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.prefix_sharing.READ_INTERVAL", 100)
    harness = start()
    harness.add(ask("a", LONG[:390]))
    for _ in range(3):
        harness.step()
    harness.abort("a")
    harness.run()
    run(harness, ask("b", LONG[:390]))
    assert cached(harness, "b") == 300
    run(harness, ask("c", LONG[5:390]), ask("d", (*LONG[5:350], 1)))
    assert cached(harness, "d") == 0, "once a prompt is read, the states on the way are dropped"


def test_a_preempted_row_starts_from_what_it_left() -> None:
    harness = start(num_blocks=140, hit=0.0)
    requests = [ask("a", LONG[:100], max_tokens=220), ask("b", LONG[50:150], max_tokens=220)]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        check(harness, request)
    assert harness.scheduler.counters.num_preemptions
    starts = [join.start.num_computed for plan in harness.runner.plans for join in plan.joins]
    assert max(starts) >= 96


# ---- compute once ----


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("recurrent", [True, False])
def test_a_prefix_is_computed_once(recurrent: bool, lag: int) -> None:
    harness = start(recurrent=recurrent, lag=lag)
    requests = [ask(str(i), (*LONG[:350], i, i + 1)) for i in range(4)]
    for request in requests:
        harness.add(request)
    other = ask("other", LONG[90:120])
    harness.add(other)
    harness.run()
    for request in (*requests, other):
        check(harness, request)
    assert [cached(harness, request.id) for request in requests] == [0, 348, 348, 348]
    assert harness.runner.num_prompt_computed <= 352 + 3 * 4 + 30
    joined = [join.tokens[: join.num_prompt] for plan in harness.runner.plans for join in plan.joins]
    assert joined.index(other.prompt_tokens) == 1, "whoever shares nothing does not wait"


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("num_shared", "num_states", "junction"), [(258, 8, 256), (310, 20, 304), (310, 2, 304)])
def test_those_that_must_wait_for_room_find_it_too(
    num_shared: int, num_states: int, junction: int, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that long prompts keep, at or behind that place, do not push it out, though nobody has forked yet."""
    monkeypatch.setattr("slipstream.engine.prefix_sharing.READ_INTERVAL", 64)
    harness = start(lag=lag, keep_grid=2 * SIZE, num_states=num_states)
    requests = [ask(f"r{i}", (*LONG[:num_shared], 90 + i, *LONG[:80]), max_tokens=2) for i in range(7)]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        check(harness, request)
    assert [cached(harness, request.id) for request in requests] == [0] + 6 * [junction]


def test_the_one_that_reads_leaves() -> None:
    """Another takes its place."""
    harness = start()
    requests = [ask(str(i), (*LONG[:390], i)) for i in range(3)]
    for request in requests:
        harness.add(request)
    harness.step()
    harness.step()
    harness.abort("0")
    harness.run()
    check(harness, requests[1])
    check(harness, requests[2])
    assert [cached(harness, key) for key in "12"] == [0, 388]


def test_one_that_waits_leaves() -> None:
    harness = start()
    requests = [ask(str(i), (*LONG[:390], i)) for i in range(3)]
    for request in requests:
        harness.add(request)
    harness.step()
    harness.abort("1")
    harness.run()
    check(harness, requests[0])
    check(harness, requests[2])


# ---- memory ----


def test_what_is_cached_counts_as_free() -> None:
    harness = start(recurrent=False, num_blocks=60)
    run(harness, ask("a", LONG[:200]))
    snapshot = harness.scheduler.snapshot()
    assert (snapshot.num_free_blocks, snapshot.num_used_blocks) == (60, 0)
    assert snapshot.num_cached_blocks >= 48
    run(harness, ask("b", LONG[100:320]))
    assert harness.scheduler.snapshot().num_cached_blocks <= 60
    assert not harness.scheduler.counters.num_preemptions


def test_the_least_useful_goes_first() -> None:
    """A prompt that was used again outlives newer ones."""
    harness = start(num_blocks=120, draft="off")
    run(harness, ask("a", LONG[:120]))
    for i in range(8):
        run(harness, ask(f"again {i}", (*LONG[:118], i)), ask(f"new {i}", LONG[130 + i : 200 + i]))
    assert all(cached(harness, f"again {i}") == 116 for i in range(1, 8))


def test_few_states_a_path() -> None:
    """System, last user message, the last two of prompts, the newest of the answer."""
    harness = start(num_states=40)
    tokens = LONG[:60]
    for turn in range(12):
        cache = PromptCache(boundaries=((40, "system"), (len(tokens) - 6, "user"), (len(tokens) - 2, "prompt")))
        request = ask(str(turn), tokens, cache=cache, max_tokens=20)
        run(harness, request)
        tokens = (*tokens, *harness.tokens[str(turn)], turn, turn)
    assert harness.scheduler.snapshot().num_used_states <= 5
    run(harness, ask("other", (*LONG[:45], 80, 81)))
    assert cached(harness, "other") == 40, "the end of the system message stays"


# ---- seven causes of wrong answers ----


def test_cause_1_no_draft_enters_a_kept_state() -> None:
    row = Row(0, list(range(10)), GREEDY, cursor=9, drafts=[1, 2, 3])
    step = RowStep(0, 4, keeps=(Keep(10, 5), Keep(11, 6), Keep(12, 7)))
    assert row.span(step, 0).keeps == (Keep(10, 5),)


@pytest.mark.parametrize("lag", [0, 1])
def test_cause_2_a_state_is_named_by_the_tokens_it_has(lag: int) -> None:
    """Drafts stride over the position."""
    for hit in (0.0, 0.5, 1.0):
        harness = start(lag=lag, hit=hit)
        run(harness, ask("a", LONG[:21], max_tokens=200))
        run(harness, ask("b", (*LONG[:21], *harness.tokens["a"], 3)))
        assert cached(harness, "b") == 192


def test_cause_3_blocks_and_state_end_at_the_same_token() -> None:
    harness = start()
    run(harness, ask("a", LONG[:200]), ask("b", (*LONG[:180], 1)))
    assert cached(harness, "b") == 0, "blocks match up to 180, but a state is only at 196"


def test_cause_4_nothing_live_is_shared() -> None:
    """A row that starts from the cache writes into blocks of its own, while others start from the same ones."""
    harness = start(recurrent=False)
    run(harness, ask("a", LONG[:100], max_tokens=40))
    requests = [ask(key, (*LONG[:100], i), seed=i, max_tokens=40) for i, key in enumerate("bcd")]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        check(harness, request)
    run(harness, ask("e", LONG[:100], max_tokens=40))
    assert tuple(harness.tokens["e"]) == tuple(harness.tokens["a"])


# Cause 5, less precision: kept states are rows of the same float32 tensors (bits: tests/runners/cpu/test_gdn.py).


@pytest.mark.parametrize("recurrent", [True, False])
def test_cause_6_the_heads_last_entry_is_of_this_continuation(recurrent: bool) -> None:
    """Two prompts part exactly after a block: the head's entry before it differs."""
    harness = start(recurrent=recurrent, draft=3, hit=1.0)
    run(harness, ask("a", (*LONG[:64], 1, 2, 3)), ask("b", (*LONG[:64], 4, 5, 6)), ask("c", (*LONG[:64], 4, 5, 6)))
    assert cached(harness, "b") == (0 if recurrent else 60)
    assert cached(harness, "c") == 64


@pytest.mark.parametrize("lag", [0, 1])
def test_cause_7_a_token_that_was_never_fed_is_not_in_the_cache(lag: int) -> None:
    """The last token of an answer, and what drafts would have added after an end token."""
    for limit in range(1, 12):
        harness = start(lag=lag, recurrent=False, hit=1.0)
        run(harness, ask("a", LONG[:54], max_tokens=limit))
        run(harness, ask("b", (*LONG[:54], *harness.tokens["a"], 1, 2, 3, 4, 5, 6, 7, 8, 9)))
        assert cached(harness, "b") <= 54 + limit - 1
    ends = continuation(LONG[:60], 1, 97, 8)[5:6]
    harness = start(lag=lag, hit=1.0)
    run(harness, ask("a", LONG[:60], ends=ends, max_tokens=30))
    run(harness, ask("b", (*LONG[:60], *harness.tokens["a"], 1, 2)))


def test_who_reads_takes_whole_steps_and_still_the_others_wait_for_it() -> None:
    harness = start()
    shared = tuple(range(75)) * 4  # three steps; only in the fourth is room for somebody else
    requests = [ask(str(i), (*shared, 81 + i, *range(40))) for i in range(3)]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        check(harness, request)
    assert cached(harness, "0") == 0
    assert all(cached(harness, str(i)) >= len(shared) - 8 for i in (1, 2))
