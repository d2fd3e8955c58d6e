"""Whatever joins, leaves, drafts and runs out of memory: each stream is the model's own plain continuation."""

from __future__ import annotations

from dataclasses import dataclass

from fakes import FakeRunner, Harness, continuation, make_info, opinions
from hypothesis import event, given, settings
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.bounds import Bounds, fold
from slipstream.engine.contract import DraftRequest, RowStep, RunnerInfo, StepCosts
from slipstream.engine.request import Request, length_limit
from slipstream.engine.scheduler import Scheduler
from slipstream.sampling.params import DraftSetting, SamplingParams
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel

VOCAB = 11  # small: stop tokens are met often


@dataclass(frozen=True)
class Arrival:
    """Requests for the same prompt."""

    at: int
    requests: tuple[Request, ...]
    abort_after: tuple[int | None, ...]


@dataclass(frozen=True)
class Case:
    info: RunnerInfo
    config: EngineConfig
    hit: float
    shy: bool
    reports: bool
    arrivals: list[Arrival]


@st.composite
def infos(draw: st.DrawFn) -> RunnerInfo:
    return make_info(
        num_slots=draw(st.integers(1, 5)),
        num_blocks=draw(st.integers(3, 30)),
        block_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
        max_context=draw(st.integers(4, 70)),
        vocab_size=VOCAB,
        max_depth=draw(st.integers(0, 4)),
        lag=draw(st.integers(0, 1)),
    )


@st.composite
def arrivals(draw: st.DrawFn, index: int, max_tokens: int, num_slots: int) -> Arrival:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=max(1, min(30, max_tokens - 1))))
    draft: DraftSetting | None = draw(st.sampled_from([None, None, "off", "solo", "adaptive", 1, 3]))
    tops = st.sampled_from([None, None, 0, 2])
    params = SamplingParams(
        max_tokens=draw(st.none() | st.integers(1, 40)), draft=draft, logprobs=draw(tops), prompt_logprobs=draw(tops)
    )
    ends = draw(st.frozensets(st.integers(0, VOCAB - 1), max_size=2))
    seed, count = draw(st.integers(0, 99)), draw(st.sampled_from([1, 1, 2, 3, 5]))
    requests = tuple(
        Request(f"r{index}.{i}", tuple(prompt), params, seed + i, 0.0, ends, 0.0) for i in range(min(count, num_slots))
    )
    return Arrival(draw(st.integers(0, 25)), requests, tuple(draw(st.none() | st.integers(0, 12)) for _ in requests))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    info = draw(infos())
    max_tokens = min(info.max_context, info.num_blocks * info.block_size)
    min_chunk = draw(st.integers(1, 6))
    config = EngineConfig(
        max_streams=draw(st.integers(1, 5)),
        max_step_tokens=min_chunk + 5 + draw(st.integers(0, 30)),
        min_chunk=min_chunk,
        draft=draw(st.sampled_from(["off", "solo", "adaptive", 1, 2, 4])),
    )
    num_slots = min(info.num_slots, config.max_streams)
    requests = [draw(arrivals(index, max_tokens, num_slots)) for index in range(draw(st.integers(1, 6)))]
    hit = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    return Case(info, config, hit, draw(st.booleans()), draw(st.booleans()), requests)


def play(case: Case) -> Harness:
    costs = StepCosts(((1, 1.0), (64, 1.5)), ((1, 0.1), (8, 0.2)))
    policy = make_policy(case.config.draft, case.info, case.config.max_depth, CostModel(costs))
    runner = FakeRunner(
        case.info, hit=case.hit, shy=case.shy, reports=case.reports, max_tokens=case.config.max_step_tokens
    )
    harness = Harness(Scheduler(case.info, policy, case.config, clock=lambda: 1.0), runner)
    for turn in range(40):
        for arrival in case.arrivals:
            if arrival.at == turn:
                harness.add(*arrival.requests)
            for request, after in zip(arrival.requests, arrival.abort_after, strict=True):
                if after is not None and arrival.at + after == turn:
                    harness.abort(request.id)
        if harness.scheduler.has_work:
            harness.step()
    harness.run()
    return harness


@settings(max_examples=400)
@given(cases())
def test_every_stream_is_the_plain_continuation(case: Case) -> None:
    harness = play(case)
    for request in (request for arrival in case.arrivals for request in arrival.requests):
        room = length_limit(request, case.info) - len(request.prompt_tokens)
        plain = continuation(request.prompt_tokens, request.seed, VOCAB, room, request.end_token_ids)
        got, final = tuple(harness.tokens[request.id]), harness.finals[request.id]
        assert final.stats is not None
        assert final.stats.output_tokens == len(got)
        if final.finish_reason == "abort":
            assert got == plain[: len(got)]
        else:
            assert got == plain
            assert final.finish_reason == ("stop" if plain[-1] in request.end_token_ids else "length")
        check_logprobs(harness, request)
    check_end(harness)


def check_logprobs(harness: Harness, request: Request) -> None:
    """Each token's, once; the prompt's with the first tokens."""
    prompt, got, params = request.prompt_tokens, harness.tokens[request.id], request.params
    after = len(prompt) - 1
    logprobs = [] if params.logprobs is None else opinions((*prompt, *got), params.logprobs)[after:]
    assert harness.logprobs[request.id] == logprobs
    has_prompt = params.prompt_logprobs is not None and got
    of_prompt = opinions((*prompt, *got), params.prompt_logprobs or 0)[:after]
    assert harness.prompt_logprobs[request.id] == (of_prompt if has_prompt else [])


def check_end(harness: Harness) -> None:
    snapshot = harness.scheduler.snapshot()
    event(f"preempted: {snapshot.num_preemptions > 0}")
    event(
        f"started from a parent: {any(join.start.num_computed for plan in harness.runner.plans for join in plan.joins)}"
    )
    assert (snapshot.num_used_blocks, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    assert snapshot.num_output_tokens == sum(len(tokens) for tokens in harness.tokens.values())
    stats = [final.stats for final in harness.finals.values() if final.stats]
    assert snapshot.num_draft_tokens == sum(one.draft_tokens for one in stats)
    assert snapshot.num_accepted_tokens == sum(one.accepted_tokens for one in stats)
    assert snapshot.num_drafts + snapshot.num_plain_steps == sum(one.steps for one in stats)
    for one in stats:
        assert sum(one.acceptance_histogram) == one.drafts
        assert sum(j * count for j, count in enumerate(one.acceptance_histogram)) == one.accepted_tokens
    assert not harness.runner.rows
    harness.scheduler.check_integrity()


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=4),
)
def test_bounds_hold_whatever_is_accepted(
    num_computed: int, num_uncomputed: int, num_drafts: int, steps: list[tuple[int, int, int, int]]
) -> None:
    """Play the steps with some acceptance and some number of proposals: the outcome lies within the bounds."""
    num_tokens = num_computed + num_uncomputed
    drafts = num_drafts if num_uncomputed == 1 else 0
    bounds = fold(
        Bounds(num_tokens, num_tokens, num_uncomputed, drafts),
        [RowStep(0, feed, DraftRequest(propose)) for feed, propose, _, _ in steps],
    )
    for feed, propose, accept, proposed in steps:
        if feed < num_tokens - num_computed:
            num_computed += feed
            continue
        accepted = min(accept, min(feed, num_tokens - num_computed + drafts) - (num_tokens - num_computed))
        num_computed, num_tokens = num_tokens + accepted, num_tokens + accepted + 1
        drafts = min(propose, proposed)
    assert bounds.min_tokens <= num_tokens <= bounds.max_tokens
    assert bounds.num_uncomputed == num_tokens - num_computed
    assert drafts <= bounds.max_drafts
