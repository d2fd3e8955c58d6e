"""Random traffic for any runner, and the check that every stream got its own plain tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tiny
from constrained import NAMES, constraint
from harness import Ask, LateRunner, Limited, Traffic, run_alone
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.contract import TokenLogprobs
from slipstream.sampling import SamplingParams

sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 0, 5]),
        "top_p": st.sampled_from([1.0, 1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {}, {3: 4.0, 5: -100.0}]),
        "stop_token_ids": st.sampled_from([(), (), (7, 11, 23)]),
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.sampled_from([0, 0, 0, 6]),
        "bad_words": st.sampled_from([(), (), ((5,), (3, 3), (7, 2, 9))]),
        "constraint": st.sampled_from([None] * 4 + NAMES),
        "draft": st.integers(0, 4),
        "p_min": st.sampled_from([0.0, 0.0, 0.1]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 0, 2]),
    }
)


def params(options: Mapping[str, Any]) -> SamplingParams:
    """Constraints by their names, compiled when they are first asked for."""
    least = min(options["min_tokens"], options["max_tokens"])
    return SamplingParams(**{**options, "min_tokens": least, "constraint": constraint(options["constraint"])})


asks = st.builds(
    lambda prompt, options, *rest: Ask(tuple(prompt), params(options), *rest),
    st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=40),
    sampling,
    st.integers(0, 12),
    st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30)),
    st.sampled_from([1, 1, 1, 2, 4]),
)
any_traffic = given(
    traffic=st.lists(asks, min_size=1, max_size=6),
    mode=st.sampled_from(["right", "wrong", "random", "head"]),
    late=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    tight=st.booleans(),
    budget=st.sampled_from([9, 32, 512]),
    floors=st.sampled_from([(0.0,), (1e-6,), (0.0, 0.001, 0.02), (0.05, 1.0, 0.0)]),
)

# Makes a drafter of the runner's own kind from what each stream will say, by its seed, and a mode.
MakeDrafter = Callable[[Mapping[int, Sequence[int]], str], Any]


def check(
    runner: Any,
    make_drafter: MakeDrafter,
    traffic: list[Ask],
    *,
    late: bool,
    mode: str,
    budget: int,
    floors: tuple[float, ...],
    limits: tuple[int, int] | None = None,
    tolerance: float = 0.0,
) -> None:
    """``runner`` has an ``info`` and a ``drafter`` that can be exchanged. ``limits``: see ``harness.Limited``.
    ``tolerance``: how far apart log-probabilities may be."""
    traffic = [replace(ask, params=replace(ask.params, seed=10 * i)) for i, ask in enumerate(traffic)]
    streams = [one for ask in traffic for one in ask.each]
    expected = [run_alone(runner, one) for one in streams]
    head = runner.drafter
    if mode != "head":
        truth = {
            one.params.seed: [*one.prompt, *plain.tokens["0"]] for one, plain in zip(streams, expected, strict=True)
        }
        runner.drafter = make_drafter(truth, mode)
    try:
        seen = Limited(runner, *limits) if limits else runner
        config = EngineConfig(max_streams=4, max_step_tokens=budget, min_chunk=4, block_size=seen.info.block_size)
        run = Traffic(LateRunner(seen) if late else seen, config, floors)
        run.run(traffic)
    finally:
        runner.drafter = head
    for key, (one, plain) in enumerate(zip(streams, expected, strict=True)):
        check_stream(run, str(key), one, plain, tolerance)
    if mode == "wrong":
        assert run.snapshot.num_accepted_tokens == 0


def check_stream(run: Traffic, key: str, ask: Ask, plain: Traffic, tolerance: float) -> None:
    """A stream of the traffic got what it gets alone; an aborted one the beginning of it."""
    got, want = run.tokens[key], plain.tokens["0"]
    if run.finished[key].finish_reason == "abort":
        assert ask.abort_at is not None
        assert got == want[: len(got)]
    else:
        assert got == want
        assert len(run.logprobs[key]) == len(plain.logprobs["0"])
    for reported, known in zip(run.logprobs[key], plain.logprobs["0"], strict=False):
        same_opinion(reported, known, tolerance)


def same_opinion(reported: TokenLogprobs, known: TokenLogprobs, tolerance: float) -> None:
    assert abs(reported.logprob - known.logprob) <= tolerance
    assert [token for token, _ in reported.top] == [token for token, _ in known.top]
    assert all(abs(x - y) <= tolerance for (_, x), (_, y) in zip(reported.top, known.top, strict=True))
