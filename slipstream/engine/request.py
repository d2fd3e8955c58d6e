"""A client's request (Request), its state in the engine (Sequence), its output (TokenEvent).

A Sequence applies the results of its own row. It knows no budget and no runner.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from slipstream.engine.bounds import Bounds, fold
from slipstream.engine.contract import RowJoin, RowResult, RowStep, RunnerInfo, Start, TokenLogprobs
from slipstream.engine.stats import RequestStats, RowCounters, StreamSnapshot
from slipstream.errors import PromptTooLong, RequestError
from slipstream.sampling.params import DraftSetting, SamplingParams
from slipstream.speculate.policy import PREEMPTED, UNSURE

FinishReason = Literal["stop", "length", "abort", "error"]
# The end of system message and tools; of the last message that a user wrote; of all messages, before the generation
# prompt.
Boundary = Literal["system", "user", "prompt"]


@dataclass(frozen=True, slots=True)
class PromptCache:
    """How a request uses the prefix cache."""

    enabled: bool = True  # False: it neither starts from the cache nor leaves anything there
    salt: str = ""  # only requests with the same salt share what is cached
    # Positions in the prompt up to which later prompts are likely to be the same, with the reason.
    boundaries: tuple[tuple[int, Boundary], ...] = ()


DEFAULT_CACHE = PromptCache()


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int  # resolved
    p_min: float = 0.0  # resolved
    end_token_ids: frozenset[int] = frozenset()
    arrival: float = field(default_factory=time.monotonic)
    client: str = ""  # clients take turns
    cache: PromptCache = DEFAULT_CACHE


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The output of one step for one request. A final event has a finish_reason; each request gets exactly one."""

    request_id: str
    tokens: tuple[int, ...] = ()  # all tokens new in this step; an end token is the last of them
    num_accepted: int = 0  # how many of them were drafts
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None  # in the final event
    error: str = ""  # the cause, when finish_reason is "error"
    at: float = 0.0  # when the engine had it, by the monotonic clock; 0.0: the engine was ending
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, where requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens after the first; in the first event
    cached_tokens: int = 0  # of the prompt, not computed again; where there are tokens

    @property
    def origins(self) -> tuple[int, ...]:
        """For each token: 0 for the target model's own sample, i for an accepted draft at position i."""
        return (*range(1, self.num_accepted + 1), *(0,) * (len(self.tokens) - self.num_accepted))


@dataclass(frozen=True, slots=True)
class Commit:
    """The tokens of a row that sampled, cut at the first end token or at the length limit."""

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None
    confidences: tuple[float, ...] = ()  # of the drafts verified, where they are known
    why_plain: str = ""  # why it had no drafts to verify; "": it had some, or it was the row's first sample
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, where requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # all of them, with the first tokens


def check_request(request: Request, info: RunnerInfo) -> None:
    """Raise RequestError for a request that could never run. Pure: any thread may call it."""
    prompt = request.prompt_tokens
    if not prompt:
        raise RequestError("the prompt is empty")
    room = info.max_model_len
    if len(prompt) + 1 > room:
        raise PromptTooLong(f"the prompt has {len(prompt)} tokens; with one to generate, at most {room} fit")
    check_vocabulary("the prompt", prompt, info)
    check_vocabulary("logit_bias", request.params.logit_bias, info)
    check_vocabulary("bad_words", [token for word in request.params.bad_words for token in word], info)


def check_vocabulary(name: str, tokens: Collection[int], info: RunnerInfo) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= info.vocab_size):
        raise RequestError(f"{name} has token ids outside the vocabulary of {info.vocab_size}")


def length_limit(request: Request, info: RunnerInfo) -> int:
    """Tokens, prompt included, at which the request is finished."""
    asked = request.params.max_tokens
    room = info.max_model_len
    return room if asked is None else min(room, len(request.prompt_tokens) + asked)


class Sequence:
    """A request until its end. Without a slot it waits; num_computed then is 0, afterwards what it starts with."""

    def __init__(self, request: Request, limit: int, group: object = None) -> None:
        self.request = request
        self.limit = limit
        self.group = group  # sample group: the same object for all samples of one prompt; None: no group
        self.parent: Sequence | None = None  # computes this one's prompt at the moment
        self.children: list[Sequence] = []  # their prompt is computed by this one at the moment
        self.tokens = list(request.prompt_tokens)
        self.num_computed = 0
        self.num_in_state = 0  # of those, tokens up to which its recurrent state can be kept: drafts a step later
        self.waits: Callable[[], bool] = _never  # for what another computes, or for the disk
        self.drafts: tuple[int, ...] = ()
        self.confidences: tuple[float, ...] = ()  # of the drafts, or none
        self.slot: int | None = None
        self.joined = False  # a plan with its RowJoin went out
        self.arrival_step = 0  # steps planned before it came
        self.first_token_step = math.inf  # steps planned before its first token
        self.in_flight: deque[RowStep] = deque()
        self._whys_in_flight: deque[str] = deque()  # for each of them: why it proposes no drafts
        self._why_plain = ""  # why it holds no drafts
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # so far; none once they are reported
        self.finish_reason: FinishReason | None = None
        self.counters = RowCounters()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def draft_setting(self) -> DraftSetting | None:
        return self.request.params.draft

    def came_before(self, step: float) -> bool:
        """And has no token yet. ``step``: steps that were planned by then."""
        return self.arrival_step < step and not self.num_output

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_tokens)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def bounds(self) -> Bounds:
        now = Bounds(len(self.tokens), len(self.tokens), self.num_uncomputed, len(self.drafts))
        return fold(now, self.in_flight)

    def launch(self, row: RowStep, why_plain: str) -> None:
        self.in_flight.append(row)
        self._whys_in_flight.append(why_plain)

    def join(self, start: Start, may_draft: bool) -> RowJoin:
        assert self.slot is not None
        assert not self.joined
        self.joined = True
        self.num_computed = self.num_in_state = start.num_computed
        self._why_plain = PREEMPTED if self.num_output else ""
        request = self.request
        return RowJoin(
            slot=self.slot,
            tokens=tuple(self.tokens),
            num_prompt=len(request.prompt_tokens),
            params=request.params,
            seed=request.seed,
            p_min=request.p_min,
            may_draft=may_draft,
            end_tokens=tuple(sorted(request.end_token_ids)),
            start=start,
        )

    def leave(self) -> None:
        """Wait again, or end; every known token stays known."""
        self.slot, self.joined = None, False
        self.num_computed = self.num_in_state = 0
        self.drafts, self.confidences, self.prompt_logprobs = (), (), ()

    def commit(self, result: RowResult) -> Commit | None:
        """Apply the result of the oldest step in flight; None if the row did not sample."""
        row, why_plain = self.in_flight.popleft(), self._whys_in_flight.popleft()
        num_uncomputed = self.num_uncomputed
        assert result.slot == self.slot == row.slot
        assert result.num_fed == min(row.feed, num_uncomputed + len(self.drafts))
        self.prompt_logprobs += result.prompt_logprobs
        if row.feed < num_uncomputed:
            assert not result.tokens
            self.num_computed += result.num_fed
            self.num_in_state = self.num_computed
            return None
        commit = self._commit_sample(result, result.num_fed - num_uncomputed)
        self._why_plain = "" if self.drafts else why_plain or UNSURE
        return commit

    def _commit_sample(self, result: RowResult, num_drafted: int) -> Commit:
        num_accepted = len(result.tokens) - 1
        assert 0 <= num_accepted <= num_drafted
        assert result.tokens[:-1] == self.drafts[:num_accepted]
        assert len(result.logprobs) == (0 if self.request.params.logprobs is None else len(result.tokens))
        kept, reason = self._until_end(result.tokens)
        self.num_in_state = len(self.tokens)
        self.num_computed = self.num_in_state + num_accepted
        self.tokens += kept
        why_plain = "" if num_drafted else self._why_plain
        num_drafted = min(num_drafted, len(kept)) if reason else num_drafted
        confidences = self.confidences[:num_drafted]
        self.drafts, self.confidences = result.drafts, result.confidences[: len(result.drafts)]
        self.finish_reason = reason
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, ()
        logprobs = result.logprobs[: len(kept)]
        num_accepted = min(num_accepted, len(kept))
        return Commit(kept, num_drafted, num_accepted, reason, confidences, why_plain, logprobs, prompt_logprobs)

    def _until_end(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        room = self.limit - len(self.tokens)
        for index, token in enumerate(tokens[:room]):
            if token in self.request.end_token_ids:
                return tokens[: index + 1], "stop"
        return tokens[:room], "length" if len(tokens) >= room else None

    def snapshot(self) -> StreamSnapshot:
        return self.counters.snapshot(self.id, len(self.request.prompt_tokens), self.num_output)

    def stats(self, now: float, max_depth: int) -> RequestStats:
        num_prompt, arrival = len(self.request.prompt_tokens), self.request.arrival
        return self.counters.freeze(num_prompt, self.num_output, arrival, now, self._why_plain, max_depth)


def _never() -> bool:
    return False
