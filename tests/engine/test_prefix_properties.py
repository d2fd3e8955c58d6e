"""Whatever is cached, shared, given back and dropped: each stream is the model's own plain continuation.

The fake runner checks every start: the blocks hold this prompt's tokens, the state is that of exactly so many of them,
and the head's entries were made with the tokens that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

from fakes import FakeRunner, Harness, continuation, make_info
from hypothesis import event, given, settings
from hypothesis import strategies as st

from slipstream.cache import host_tier
from slipstream.config import EngineConfig
from slipstream.engine import prefix_sharing
from slipstream.engine.contract import RunnerInfo, StepCosts
from slipstream.engine.request import PromptCache, Request, length_limit
from slipstream.engine.scheduler import Scheduler
from slipstream.sampling.params import SamplingParams
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel

VOCAB = 3  # small: prompts have much in common by chance
SMALL = {"READ_INTERVAL": 8, "OUTPUT_INTERVAL": 4, "MIN_SHARED": 4, "MIN_GAP": 2, "MIN_RESTORED": 2}


@dataclass(frozen=True)
class Arrival:
    at: int
    requests: tuple[Request, ...]
    abort_after: int | None


@dataclass(frozen=True)
class Case:
    info: RunnerInfo
    config: EngineConfig
    hit: float
    arrivals: list[Arrival]


@st.composite
def infos(draw: st.DrawFn) -> RunnerInfo:
    size, num_states = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([0, 1, 3, 8]))
    return make_info(
        num_slots=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(4, 60)),
        block_size=size,
        max_context=70,
        vocab_size=VOCAB,
        max_depth=draw(st.integers(0, 3)),
        lag=draw(st.integers(0, 1)),
        keep_grid=size * (draw(st.integers(1, 2)) if num_states else 1),
        num_states=num_states,
        num_host_blocks=draw(st.sampled_from([0, 5, 200])),
        num_host_states=draw(st.integers(1, 6)) if num_states else 0,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    info = draw(infos())
    config = EngineConfig(
        max_streams=4,
        max_step_tokens=draw(st.integers(10, 40)),
        min_chunk=draw(st.integers(1, 6)),
        draft=draw(st.sampled_from(["off", "adaptive", 2])),
    )
    room = info.max_model_len
    book = draw(st.lists(st.integers(0, VOCAB - 1), min_size=20, max_size=40))
    told: list[tuple[int, ...]] = []  # prompts with their answers: what a next turn begins with
    arrivals = []
    for index in range(draw(st.integers(2, 8))):
        start = draw(st.sampled_from([tuple(book), *told]))
        end = draw(st.integers(max(0, len(start) - 6), len(start)))  # a message is edited now and then
        new = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)))
        prompt = (start[:end] + new)[: room - 1]
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 12)),
            draft=draw(st.sampled_from([None, None, "off", 1])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        )
        ends = frozenset(draw(st.sampled_from([(), (0,)])))
        kinds = st.sampled_from(["system", "user", "prompt"])
        boundaries = draw(st.lists(st.tuples(st.integers(0, len(prompt)), kinds), max_size=3))
        cache = PromptCache(
            draw(st.sampled_from([True, True, True, False])), draw(st.sampled_from(["", "", "b"])), tuple(boundaries)
        )
        seed, count = draw(st.integers(0, 3)), draw(st.sampled_from([1, 1, 1, 2]))
        requests = tuple(
            Request(f"r{index}.{i}", prompt, params, seed + i, 0.0, ends, 0.0, "", cache)
            for i in range(min(count, info.num_slots))
        )
        told.append(prompt + continuation(prompt, seed, VOCAB, 12, ends))
        arrivals.append(Arrival(draw(st.integers(0, 60)), requests, draw(st.none() | st.none() | st.integers(0, 12))))
    return Case(info, config, draw(st.sampled_from([0.0, 0.6, 1.0])), arrivals)


def play(case: Case) -> Harness:
    costs = StepCosts(((1, 1.0), (64, 1.5)), ((1, 0.1), (8, 0.2)))
    policy = make_policy(case.config.draft, case.info, case.config.max_depth, CostModel(costs))
    runner = FakeRunner(case.info, hit=case.hit, shy=True, max_tokens=case.config.max_step_tokens)
    with patch.multiple(prefix_sharing, **SMALL), patch.multiple(host_tier, SAVED_BLOCKS=3, MIN_SAVED=2):
        harness = Harness(Scheduler(case.info, policy, case.config, clock=lambda: 1.0), runner)
        for turn in range(80):
            for arrival in case.arrivals:
                if arrival.at == turn:
                    harness.add(*arrival.requests)
                if arrival.abort_after is not None and arrival.at + arrival.abort_after == turn:
                    harness.abort(arrival.requests[0].id)
            if harness.scheduler.has_work:
                harness.step()
        harness.run()
    return harness


@settings(max_examples=600)
@given(cases())
def test_every_stream_is_the_plain_continuation(case: Case) -> None:
    harness = play(case)
    for request in (request for arrival in case.arrivals for request in arrival.requests):
        room = length_limit(request, case.info) - len(request.prompt_tokens)
        plain = continuation(request.prompt_tokens, request.seed, VOCAB, room, request.end_token_ids)
        got, final = tuple(harness.tokens[request.id]), harness.finals[request.id]
        assert got == (plain[: len(got)] if final.finish_reason == "abort" else plain)
        assert final.stats is not None
        assert final.stats.cached_tokens < len(request.prompt_tokens)
        if not request.cache.enabled or request.params.prompt_logprobs is not None:
            assert final.stats.cached_tokens == 0
        event(f"cached: {final.stats.cached_tokens > 0}")
    snapshot = harness.scheduler.snapshot()
    event(f"preempted: {snapshot.num_preemptions > 0}")
    event(f"kept: {harness.runner.num_kept > 0}")
    event(f"copied back: {harness.runner.num_loaded > 0}")
    assert (snapshot.num_used_blocks, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    assert snapshot.num_used_states <= case.info.num_states
    harness.scheduler.check_integrity()
