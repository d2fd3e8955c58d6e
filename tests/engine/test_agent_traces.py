"""Recorded sessions of a coding agent against the prefix cache of a 27B model with recurrent layers: how much is read.

The numbers of the sample are in docs/benchmarks.md. States never take more than a tenth of the memory of KV.
"""

from __future__ import annotations

import pytest
from agent_simulation import CachingEngine, block_tokens, together

from slipstream.bench.conversations.traces import Replay, load_sessions
from slipstream.cache.prefix_cache import PrefixCache
from slipstream.cache.prefix_tree import KeptState, Node, common_length

SESSIONS = load_sessions()
ALL_TOKENS = 1_400_000  # of all sessions, what they share with themselves counted once
SHORT = [s for s in SESSIONS if len(s.requests) < 60 and max(r.num_prompt for r in s.requests) < 120_000]
FEW_TOKENS = 250_000  # room for half of what the short sessions have


def test_the_sample() -> None:
    assert len(SESSIONS) == 10
    assert sum(len(session.requests) for session in SESSIONS) == 410
    assert max(request.agent for session in SESSIONS for request in session.requests) > 0, "no sub-agents"
    for session in SESSIONS:
        assert all(len(request.blocks) == request.num_prompt // 64 for request in session.requests)


def test_prompts_share_as_many_tokens_as_their_blocks_say() -> None:
    session = SESSIONS[0]
    replay = Replay(session, block_tokens)
    prompts = [replay.prompt(i) for i in range(len(session.requests))]
    for i, (prompt, request) in enumerate(zip(prompts, session.requests, strict=True)):
        assert len(prompt) == request.num_prompt
        shared = max((common_length(prompt, 0, earlier) for earlier in prompts[:i]), default=0)
        assert session.limit[i] <= shared < session.limit[i] + 64


def test_the_next_prompt_has_the_answer_that_was_given() -> None:
    session = SESSIONS[0]
    replay = Replay(session, block_tokens)
    replay.answered(0, [-7, -8, -9])
    start = session.requests[0].num_prompt
    assert session.continued_by[0] == 1
    assert replay.prompt(1)[start : start + 3] == [-7, -8, -9]
    assert replay.prompt(1)[:start] == replay.prompt(0)


def test_a_shrunk_session_shares_the_same_blocks() -> None:
    whole = SESSIONS[1]
    small = whole.shrunk(16, 10**9, len(whole.requests))
    assert [16 * limit for limit in small.limit] == list(whole.limit)
    assert len(Replay(small, lambda block: [block] * 4).prompt(3)) == small.requests[3].num_prompt
    few = whole.shrunk(1, whole.requests[4].num_prompt, 100)
    assert 1 <= len(few.requests) < len(whole.requests)


def test_with_memory_for_all_nearly_nothing_is_read_twice() -> None:
    outcome = together(SESSIONS, CachingEngine(ALL_TOKENS, 0.1))
    assert outcome.of_limit > 1.002
    assert outcome.mean_of_limit < 0.96
    assert outcome.median_read <= 520


def test_eviction_by_what_would_be_read_again_beats_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = together(SHORT, CachingEngine(FEW_TOKENS, 0.1))

    def age(cache: PrefixCache, state: KeptState) -> float:
        return state.used - cache._now

    def leaf_age(cache: PrefixCache, leaf: Node) -> float:
        return age(cache, leaf.state) if leaf.state is not None else leaf.used - cache._now

    monkeypatch.setattr(PrefixCache, "_worth", age)
    monkeypatch.setattr(PrefixCache, "_leaf_worth", leaf_age)
    plain = together(SHORT, CachingEngine(FEW_TOKENS, 0.1))
    assert ours.hit_rate > 0.82
    assert ours.hit_rate > plain.hit_rate + 0.1
    assert sum(ours.read) < 0.65 * sum(plain.read)
