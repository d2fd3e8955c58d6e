"""What drafting did over an answer, in one sentence; and the longest request that an engine takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import FakeRunner, Harness, continuation, make_info, make_request
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineConfig
from slipstream.engine.contract import NO_DRAFTS, DraftRequest, RunnerInfo, StepCosts
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.stats import RequestStats
from slipstream.errors import PromptTooLong
from slipstream.sampling.params import DraftSetting
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import DepthPolicy, Fixed, Load, SamplingRow

CONFIG = EngineConfig(max_streams=4, max_step_tokens=32, min_chunk=4)


class Plain(DepthPolicy):
    """Drafts one deep, but for the steps whose reasons are given."""

    def __init__(self, whys: Sequence[str]) -> None:
        self._whys = list(whys)
        self._why = ""

    @property
    def reason(self) -> str:
        return "by table"

    def why_plain(self, setting: DraftSetting | None) -> str:
        return self._why

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        self._why = self._whys.pop(0) if self._whys else ""
        return [NO_DRAFTS if self._why else DraftRequest(min(1, row.max_depth)) for row in rows]


def play(policy: DepthPolicy, info: RunnerInfo | None = None, *, hit: float = 1.0, **params: object) -> RequestStats:
    info = info or make_info()
    harness = Harness(Scheduler(info, policy, CONFIG, clock=lambda: 1.0), FakeRunner(info, hit=hit))
    harness.add(make_request("a", **params))  # type: ignore[arg-type]
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    return stats


@pytest.mark.parametrize("lag", [0, 1])
def test_the_sentence_is_about_the_whole_answer_not_about_its_last_step(lag: int) -> None:
    """Steps of 1, 2, 1, 1, 2, 2, 2 tokens: the first is the prompt's, two are plain, and the last ones drafted."""
    stats = play(Plain(["", "it rained", "it rained"]), make_info(lag=lag), max_tokens=11)
    assert (stats.drafts, stats.plain_steps, stats.output_tokens) == (4, 3, 11)
    assert stats.speculation == "drafted in 57 % of steps, 1.6 tokens a step; off where it rained"


def test_the_most_frequent_reason_is_told() -> None:
    stats = play(Plain(["", "it snowed", "it rained", "it rained"]), max_tokens=20)
    assert stats.speculation.endswith("; off where it rained")


def test_drafted_in_every_step() -> None:
    stats = play(Fixed(3), max_tokens=9)
    assert (stats.drafts, stats.plain_steps) == (2, 1)
    assert stats.speculation == "drafted in every step, 3.0 tokens a step"


def test_a_plain_step_for_want_of_room() -> None:
    stats = play(Fixed(3), max_tokens=6)
    assert [stats.drafts, stats.plain_steps] == [1, 2]
    assert stats.speculation == "drafted in 33 % of steps, 2.0 tokens a step; off where there was no room for a draft"


def test_a_head_that_proposes_nothing() -> None:
    info = make_info()
    scheduler = Scheduler(info, Fixed(2), CONFIG, clock=lambda: 1.0)
    harness = Harness(scheduler, FakeRunner(info, shy=True))
    harness.add(make_request("a", max_tokens=60))
    harness.run()
    stats = harness.finals["a"].stats
    assert stats is not None
    assert stats.speculation.endswith("; off where the head was not sure enough")


@pytest.mark.parametrize(
    ("draft", "max_depth", "own", "why"),
    [
        ("adaptive", 0, None, "the model has no MTP head"),
        ("off", 3, None, "the server's settings turn drafting off"),
        (2, 3, "off", "the request turned drafting off"),
        (2, 3, 0, "the request turned drafting off"),
    ],
)
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_never_drafted_and_why(
    draft: DraftSetting, max_depth: int, own: DraftSetting | None, why: str, max_tokens: int
) -> None:
    info = make_info(max_depth=max_depth)
    stats = play(make_policy(draft, info, 4, CostModel()), info, max_tokens=max_tokens, draft=own)
    assert stats.speculation == f"not drafted: {why}"


def test_plain_steps_of_the_adaptive_policy_were_faster() -> None:
    info = make_info()
    costs = StepCosts(((1, 1.0), (2, 9.0)), ((1, 9.0),))
    stats = play(make_policy("adaptive", info, 4, CostModel(costs)), info, max_tokens=8)
    assert stats.speculation == "not drafted: a plain step was faster"


def test_an_answer_that_ends_at_once() -> None:
    [end] = continuation((1, 2, 3), 1, 97, 1)
    assert play(Fixed(2), ends=(end,)).speculation == (
        "not drafted: the answer ended before its first draft was verified"
    )


def test_the_histogram_of_accepted_drafts() -> None:
    stats = play(Fixed(2), make_info(), hit=0.6, max_tokens=60)
    histogram = stats.acceptance_histogram
    assert len(histogram) == stats.max_depth + 1 == 4
    assert sum(histogram) == stats.drafts
    assert sum(j * count for j, count in enumerate(histogram)) == stats.accepted_tokens
    assert min(histogram[:3]) > 0
    assert histogram[3] == 0


@given(st.integers(1, 9), st.integers(1, 12), st.integers(2, 40), st.integers(0, 3), st.integers(0, 1))
def test_a_request_of_exactly_the_longest_length_runs_and_one_token_more_is_refused(
    block_size: int, num_blocks: int, max_context: int, max_depth: int, lag: int
) -> None:
    info = make_info(
        block_size=block_size, num_blocks=num_blocks, max_context=max_context, max_depth=max_depth, lag=lag
    )
    longest = info.max_model_len
    policy = make_policy("adaptive", info, 4, CostModel())
    harness = Harness(Scheduler(info, policy, CONFIG, clock=lambda: 1.0), FakeRunner(info))
    with pytest.raises(PromptTooLong, match=rf"has {longest} tokens; .* at most {longest} fit"):
        harness.add(make_request("b", [5] * longest))
    if longest > 1:
        harness.add(make_request("a", [5] * (longest - 1), max_tokens=None))
        harness.run()
        assert len(harness.tokens["a"]) == 1
        assert harness.finals["a"].finish_reason == "length"
