"""The scheduler with the fake runner: chunks, drafts, limits, memory, aborts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import FakeRunner, Harness, continuation, make_info, make_request

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, RunnerInfo
from slipstream.engine.scheduler import Scheduler
from slipstream.errors import RequestError
from slipstream.speculate.cost_model import CostModel, StepTiming
from slipstream.speculate.policy import DepthPolicy, Fixed, Load, Off, SamplingRow

CONFIG = EngineConfig(max_streams=4, max_step_tokens=32, min_chunk=4)
EVERYTHING = EngineConfig(max_streams=16, max_step_tokens=512)


def make_harness(
    info: RunnerInfo | None = None,
    policy: DepthPolicy | None = None,
    config: EngineConfig = CONFIG,
    costs: CostModel | None = None,
    **runner: float,
) -> Harness:
    info = info or make_info()
    scheduler = Scheduler(info, policy or Fixed(2), config, clock=lambda: 5.0, costs=costs)
    return Harness(scheduler, FakeRunner(info, max_tokens=config.max_step_tokens, **runner))  # type: ignore[arg-type]


def expected(harness: Harness, *prompt: int, count: int = 16, seed: int = 1) -> list[int]:
    return list(continuation(prompt, seed, harness.runner.info.vocab_size, count))


def test_one_stream_gives_the_models_own_tokens() -> None:
    harness = make_harness(hit=0.6)
    harness.add(make_request("a", (1, 2, 3)))
    harness.run()
    assert harness.tokens["a"] == expected(harness, 1, 2, 3)
    assert harness.finals["a"].finish_reason == "length"


def test_a_long_prompt_is_fed_in_chunks_and_samples_once() -> None:
    harness = make_harness(policy=Off("test"))
    harness.add(make_request("a", range(70), max_tokens=1))
    harness.run()
    feeds = [row.feed for plan in harness.runner.plans for row in plan.rows]
    assert feeds == [32, 32, 6]
    assert harness.tokens["a"] == expected(harness, *range(70), count=1)


def test_every_token_of_a_step_is_in_one_event() -> None:
    harness = make_harness(policy=Fixed(3), hit=1.0)
    harness.add(make_request("a", max_tokens=9))
    harness.run()
    assert [(len(event.tokens), event.num_accepted) for event in harness.events] == [(1, 0), (4, 3), (4, 3)]


def test_the_gain_is_the_time_of_plain_steps_over_that_of_the_steps() -> None:
    class Timed(CostModel):
        def plain_seconds(self, timing: StepTiming) -> float:
            return 0.02 * timing.decoding.num_rows

    harness = make_harness(policy=Fixed(3), costs=Timed(), hit=1.0)
    collect = harness.runner.collect
    harness.runner.collect = lambda: replace(collect(), verify_seconds=0.04, draft_seconds=0.01)  # type: ignore[method-assign]
    harness.add(make_request("a", max_tokens=9))
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    assert stats.gain == pytest.approx(8 * 0.02 / (2 * 0.05))  # the first token came with the prompt


def test_without_a_cost_curve_no_gain_is_known() -> None:
    harness = make_harness(policy=Fixed(3), hit=1.0)
    harness.add(make_request("a", max_tokens=9))
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    assert stats.gain is None


def test_partial_acceptance_keeps_what_was_right() -> None:
    harness = make_harness(policy=Fixed(3), hit=0.5)
    harness.add(make_request("a", max_tokens=60))
    harness.run()
    sizes = {len(event.tokens) for event in harness.events}
    assert sizes == {1, 2, 3, 4}
    assert harness.tokens["a"] == expected(harness, 1, 2, 3, count=60)


def test_decode_rows_go_before_prompts_and_the_budget_holds() -> None:
    harness = make_harness(policy=Fixed(2))
    harness.add(make_request("a", max_tokens=40))
    harness.step()
    harness.add(make_request("b", range(80), max_tokens=1))
    plans = [harness.step() for _ in range(3)]
    assert [[row.feed for row in plan.rows] for plan in plans if plan] == [[3, 29], [3, 29], [3, 22]]


def test_prompts_progress_however_many_rows_decode() -> None:
    config = EngineConfig(max_streams=4, max_step_tokens=8, min_chunk=4)
    harness = make_harness(policy=Fixed(3), config=config)
    for key in "abc":
        harness.add(make_request(key, (ord(key) % 97,), max_tokens=30))
    for _ in range(3):
        harness.step()
    harness.add(make_request("d", range(20), max_tokens=2))
    plan = harness.step()
    assert plan is not None
    assert sum(row.feed for row in plan.rows) <= 8
    assert plan.rows[-1].feed >= 4
    harness.run()
    assert harness.tokens["d"] == expected(harness, *range(20), count=2)


def test_requests_are_admitted_in_the_order_they_came() -> None:
    harness = make_harness(info=make_info(num_slots=1))
    for key in "abc":
        harness.add(make_request(key, (ord(key) % 97,), max_tokens=3))
    harness.run()
    assert list(harness.finals) == ["a", "b", "c"]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_length_is_exact_inside_an_accepted_run(lag: int, max_tokens: int) -> None:
    harness = make_harness(info=make_info(lag=lag), policy=Fixed(3))
    harness.add(make_request("a", max_tokens=max_tokens))
    harness.run()
    final = harness.finals["a"]
    assert final.finish_reason == "length"
    assert harness.tokens["a"] == expected(harness, 1, 2, 3, count=max_tokens)
    assert final.stats is not None
    assert final.stats.accepted_tokens == final.stats.draft_tokens


@pytest.mark.parametrize("lag", [0, 1])
def test_context_is_never_passed(lag: int) -> None:
    harness = make_harness(info=make_info(lag=lag, max_context=23, num_blocks=6), policy=Fixed(3), hit=0.8)
    harness.add(make_request("a", range(10), max_tokens=None))
    harness.add(make_request("b", range(5), max_tokens=500))
    harness.run()
    assert len(harness.tokens["a"]) == 13
    assert len(harness.tokens["b"]) == 18
    assert {final.finish_reason for final in harness.finals.values()} == {"length"}


def test_a_row_sure_to_finish_is_not_planned_again() -> None:
    harness = make_harness(info=make_info(lag=1), policy=Off("test"))
    harness.add(make_request("a", max_tokens=4))
    harness.run()
    assert sum(bool(plan.rows) for plan in harness.runner.plans) == 4


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("position", range(10))
def test_nothing_follows_a_stop_token(lag: int, position: int) -> None:
    harness = make_harness(info=make_info(lag=lag, vocab_size=9973), policy=Fixed(3))
    plain = expected(harness, 1, 2, 3, count=40)
    assert len(set(plain[:10])) == 10
    harness.add(make_request("a", max_tokens=40, ends=[plain[position]]))
    harness.run()
    final = harness.finals["a"]
    assert harness.tokens["a"] == plain[: position + 1]
    assert final.finish_reason == "stop"
    assert final.stats is not None
    assert final.stats.output_tokens == position + 1
    assert final.stats.output_tokens == final.stats.steps + final.stats.accepted_tokens - (position % 4 != 0)
    assert final.stats.accepted_tokens == final.stats.draft_tokens


def test_stop_inside_a_run_cuts_the_draft_counts() -> None:
    harness = make_harness(policy=Fixed(3))
    plain = expected(harness, 1, 2, 3)
    harness.add(make_request("a", ends=[plain[2]]))
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (1, 2, 2)
    assert stats.accepted_per_position == (1, 1)
    assert harness.scheduler.snapshot().num_output_tokens == 3


def test_a_preempted_stream_resumes_where_it_was() -> None:
    info = make_info(num_blocks=14, max_context=56)
    harness = make_harness(info=info, policy=Fixed(2), hit=0.7)
    for seed, key in enumerate("abc"):
        harness.add(make_request(key, (1, 2, 3), seed=seed, max_tokens=40))
    harness.run()
    snapshot = harness.scheduler.snapshot()
    assert snapshot.num_preemptions > 0
    for seed, key in enumerate("abc"):
        assert harness.tokens[key] == expected(harness, 1, 2, 3, count=40, seed=seed)
    rejoin = next(join for plan in harness.runner.plans for join in plan.joins if len(join.tokens) > 3)
    assert rejoin.num_prompt == 3
    assert (snapshot.num_used_blocks, snapshot.num_running) == (0, 0)


def test_the_oldest_stream_is_never_preempted() -> None:
    harness = make_harness(info=make_info(num_blocks=14, max_context=56, lag=1), policy=Fixed(3))
    for seed, key in enumerate("abcd"):
        harness.add(make_request(key, seed=seed, max_tokens=45))
    harness.run()
    preemptions = {key: final.stats.preemptions for key, final in harness.finals.items() if final.stats}
    assert preemptions["a"] == 0
    assert sum(preemptions.values()) == harness.scheduler.snapshot().num_preemptions > 0


def test_drafting_preempts_nobody() -> None:
    info = make_info(num_slots=2, num_blocks=4, block_size=8, max_context=16)
    harness = make_harness(info=info, policy=Fixed(3))
    for key in "ab":
        harness.add(make_request(key, max_tokens=13))
    harness.run()
    assert harness.scheduler.snapshot().num_preemptions == 0


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ((), {}, "empty"),
        (range(64), {}, "at most 64"),
        ((1, 97), {}, "vocabulary"),
        ((-1,), {}, "vocabulary"),
        ((1,), {"logit_bias": {97: 1.0}}, "logit_bias"),
        ((1,), {"bad_words": ((1, 97),)}, "bad_words"),
    ],
)
def test_what_can_never_run_is_refused(prompt: tuple[int, ...], params: dict[str, object], words: str) -> None:
    harness = make_harness(info=make_info(num_blocks=16))
    with pytest.raises(RequestError, match=words):
        harness.add(make_request("a", prompt, **params))
    assert not harness.scheduler.has_work


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_steps", range(8))
def test_abort_at_any_time_frees_everything(lag: int, num_steps: int) -> None:
    """Waiting, in a prompt, decoding, in flight: 'b' needs three steps to be read, 'c' waits for a slot."""
    harness = make_harness(info=make_info(lag=lag, num_slots=2))
    harness.add(make_request("a", max_tokens=30))
    harness.add(make_request("b", range(80), max_tokens=30))
    harness.add(make_request("c", max_tokens=30, seed=3))
    for _ in range(num_steps):
        harness.step()
    for key in ("b", "c", "b", "nobody"):
        harness.abort(key)
    harness.run()
    assert {key: final.finish_reason for key, final in harness.finals.items()} == {
        "a": "length",
        "b": "abort",
        "c": "abort",
    }
    assert harness.tokens["a"] == expected(harness, 1, 2, 3, count=30)
    assert harness.scheduler.snapshot().num_used_blocks == 0
    assert not harness.runner.rows


def test_abort_while_preempted_and_after_the_end() -> None:
    harness = make_harness(info=make_info(num_blocks=14, max_context=56), policy=Fixed(2))
    for seed, key in enumerate("abc"):
        harness.add(make_request(key, seed=seed, max_tokens=40))
    while not harness.scheduler.snapshot().num_preemptions:
        harness.step()
    harness.abort("c")
    harness.run()
    harness.abort("a")
    assert harness.finals["c"].finish_reason == "abort"
    assert harness.finals["c"].stats is not None
    assert harness.finals["c"].stats.preemptions == 1
    assert harness.tokens["b"] == expected(harness, 1, 2, 3, count=40, seed=1)


def test_a_late_result_is_not_given_to_the_slots_new_owner() -> None:
    harness = make_harness(info=make_info(lag=1, num_slots=1), policy=Fixed(2))
    harness.add(make_request("a", max_tokens=30))
    harness.add(make_request("b", seed=2, max_tokens=5))
    for _ in range(3):
        harness.step()
    assert harness.scheduler.num_in_flight == 1
    harness.abort("a")
    plan = harness.step()
    assert plan is not None
    assert plan.leaves == (0,)
    assert plan.joins[0].slot == 0
    harness.run()
    assert harness.tokens["b"] == expected(harness, 1, 2, 3, count=5, seed=2)


def test_the_runner_gets_every_leave_before_idling() -> None:
    harness = make_harness()
    harness.add(make_request("a", max_tokens=2))
    harness.run()
    assert not harness.runner.rows
    assert harness.scheduler.schedule() is None


def test_stats_of_a_request() -> None:
    harness = make_harness(policy=Off("the model has no MTP head"))
    harness.add(make_request("a", max_tokens=3))
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.output_tokens, stats.steps, stats.plain_steps) == (3, 3, 3, 3)
    assert stats.speculation == "not drafted: the model has no MTP head"
    assert (stats.first_token_seconds, stats.total_seconds) == (5.0, 5.0)
    assert (stats.acceptance_rate, stats.mean_accepted_length) == (0.0, 1.0)


def test_counters_of_the_engine() -> None:
    harness = make_harness(policy=Fixed(3), config=EVERYTHING)
    harness.add(make_request("a", max_tokens=9))
    harness.run()
    snapshot = harness.scheduler.snapshot()
    assert (snapshot.num_drafts, snapshot.num_draft_tokens, snapshot.num_accepted_tokens) == (2, 6, 6)
    assert snapshot.accepted_per_position == (2, 2, 2)
    assert (snapshot.num_plain_steps, snapshot.num_steps) == (1, 3)
    assert (snapshot.num_prompt_tokens, snapshot.num_output_tokens) == (3, 9)
    assert (snapshot.acceptance_rate, snapshot.mean_accepted_length) == (1.0, 4.0)
    assert snapshot.finished == {"length": 1}
    assert snapshot.tokens_per_step == 9 / 3
    assert snapshot.draft_share == 2 / 3
    assert snapshot.depth_reason == "drafting 3 tokens ahead, as set"
    assert (sum(snapshot.step_sizes), snapshot.num_fed) == (3, 3 + 4 + 4)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_fault_ends_its_own_stream(lag: int) -> None:
    harness = make_harness(info=make_info(lag=lag))
    harness.add(make_request("a", max_tokens=20))
    harness.add(make_request("b", (4, 5), max_tokens=20))
    for _ in range(4):
        harness.step()
    plan = harness.scheduler.schedule()
    assert plan is not None
    harness.runner.submit(plan)
    result = harness.runner.collect()  # with lag, of the step before
    faulty = replace(result.rows[0], tokens=(), drafts=(), confidences=(), fault="no way on")
    before = list(harness.tokens["a"])
    for event in harness.scheduler.apply(replace(result, rows=(faulty, *result.rows[1:]))):
        harness._take(event)
    harness.run()
    assert (harness.finals["a"].finish_reason, harness.finals["a"].error) == ("error", "no way on")
    assert harness.tokens["a"] == before == expected(harness, 1, 2, 3, count=len(before))
    assert harness.tokens["b"] == expected(harness, 4, 5, count=20)
    assert harness.scheduler.snapshot().finished == {"error": 1, "length": 1}


def test_a_join_has_the_end_tokens() -> None:
    harness = make_harness()
    harness.add(make_request("a", ends=(7, 3)))
    harness.step()
    assert harness.runner.plans[0].joins[0].end_tokens == (3, 7)


class Loads(Fixed):
    """Keeps what the policy was shown."""

    def __init__(self) -> None:
        super().__init__(3)
        self.seen: list[Load] = []

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        self.seen.append(load)
        return super().decide(rows, load)


def test_the_policy_is_shown_how_many_drafts_fit_into_a_step() -> None:
    policy = Loads()
    harness = make_harness(policy=policy)
    harness.add(make_request("a"))
    harness.run()
    assert {(load.num_running, load.num_plain, load.room) for load in policy.seen} == {(1, 0, 32 - 4 - 1)}
