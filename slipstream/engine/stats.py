"""Counters of drafting and of the engine's work, and their frozen snapshots.

A draft counts when it is verified: drafts that a row still holds when it ends count nowhere. The bonus token (the
row's own sample) is never an accepted draft. Knows no metrics format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens that a step feeds


def acceptance_rate(num_accepted: int, num_draft_tokens: int) -> float:
    return num_accepted / num_draft_tokens if num_draft_tokens else 0.0


def mean_accepted_length(num_accepted: int, num_drafts: int) -> float:
    """Tokens a step of a drafting row yields, its own sample included. Steps without drafts do not count."""
    return 1.0 + num_accepted / num_drafts if num_drafts else 1.0


def tokens_per_step(num_tokens: int, num_drafts: int, num_plain: int) -> float:
    """Over all steps of a row in which it sampled, with drafts and without."""
    return num_tokens / (num_drafts + num_plain) if num_drafts + num_plain else 0.0


def draft_share(num_drafts: int, num_plain: int) -> float:
    """Of the steps in which a row sampled, those with drafts."""
    return num_drafts / (num_drafts + num_plain) if num_drafts else 0.0


class DraftCounters:
    """Verified and accepted drafts; kept per request and for the engine."""

    def __init__(self) -> None:
        self.num_drafts = 0  # times a row had drafts verified
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_plain_steps = 0  # times a row sampled without a draft
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        if not num_drafted:
            self.num_plain_steps += 1
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = num_drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for position in range(num_drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < num_accepted


class Gain:
    """How much faster a row got its tokens than by steps without drafts: their time by the policy's costs, over the
    time that its steps took. Steps next to prompts do not count."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._plain_seconds = 0.0

    def count(self, num_tokens: int, seconds: float, plain_seconds: float) -> None:
        """A step gave ``num_tokens``; ``plain_seconds``: a step without drafts would have taken so long."""
        self._seconds += seconds
        self._plain_seconds += num_tokens * plain_seconds

    @property
    def factor(self) -> float | None:
        return self._plain_seconds / self._seconds if self._seconds else None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request, at its end."""

    prompt_tokens: int
    output_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    steps: int  # steps in which it sampled
    plain_steps: int  # of those, without a draft
    preemptions: int
    gain: float | None  # over steps without drafts, as a factor; None: no step was timed
    first_token_seconds: float | None  # from arrival; None: it never got a token
    total_seconds: float
    queue_seconds: float | None  # from arrival to its first step; None: it never had one
    why_plain: str = ""  # the most frequent reason for steps without drafts; "": only its first step had none
    cached_tokens: int = 0  # of the prompt, not computed again
    cache_note: str = ""  # why not more of them, one line for people
    max_depth: int = 0  # the most drafts that the engine gives a row

    @property
    def acceptance_rate(self) -> float:
        return acceptance_rate(self.accepted_tokens, self.draft_tokens)

    @property
    def mean_accepted_length(self) -> float:
        return mean_accepted_length(self.accepted_tokens, self.drafts)

    @property
    def tokens_per_step(self) -> float:
        return tokens_per_step(self.output_tokens, self.drafts, self.plain_steps)

    @property
    def draft_share(self) -> float:
        return draft_share(self.drafts, self.plain_steps)

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """[max_depth + 1]: how many steps with drafts accepted exactly 0, 1, ... of them."""
        missing = self.max_depth - len(self.accepted_per_position)
        at_least = (self.drafts, *self.accepted_per_position, *(0,) * missing, 0)
        return tuple(count - more for count, more in pairwise(at_least))

    @property
    def speculation(self) -> str:
        """What drafting did over the whole answer, for people to read."""
        if not self.drafts:
            return f"not drafted: {self.why_plain or 'the answer ended before its first draft was verified'}"
        yielded = f"{self.tokens_per_step:.1f} tokens a step"
        if not self.why_plain:
            return f"drafted in every step, {yielded}"
        return f"drafted in {100 * self.draft_share:.0f} % of steps, {yielded}; off where {self.why_plain}"


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """One running stream at one moment."""

    id: str
    prompt_tokens: int
    output_tokens: int
    depth: int  # when it sampled last
    draft_tokens: int
    accepted_tokens: int
    first_token_at: float | None  # by the monotonic clock; None: its prompt is still being read
    gain: float | None  # as in RequestStats


class RowCounters(DraftCounters):
    """The counters of one request until its end."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()
        self.num_preemptions = 0
        self.why_plain: Counter[str] = Counter()  # reasons for steps without drafts
        self.last_depth = 0  # drafts requested when it sampled last
        self.cached_tokens = 0  # of the prompt, when it joined for the first time
        self.cache_note = ""  # why not more
        self.joined_at: float | None = None  # the first time
        self.first_token_at: float | None = None

    def join(self, now: float) -> None:
        self.joined_at = now if self.joined_at is None else self.joined_at

    def freeze(
        self, num_prompt: int, num_output: int, arrival: float, now: float, last_why: str, max_depth: int
    ) -> RequestStats:
        """``last_why``: why it held no drafts at its end."""
        if not self.num_drafts and not self.why_plain:
            self.why_plain[last_why] += 1
        return RequestStats(
            prompt_tokens=num_prompt,
            output_tokens=num_output,
            drafts=self.num_drafts,
            draft_tokens=self.num_draft_tokens,
            accepted_tokens=self.num_accepted_tokens,
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            steps=self.num_drafts + self.num_plain_steps,
            plain_steps=self.num_plain_steps,
            preemptions=self.num_preemptions,
            gain=self.gain.factor,
            first_token_seconds=None if self.first_token_at is None else self.first_token_at - arrival,
            total_seconds=now - arrival,
            queue_seconds=None if self.joined_at is None else self.joined_at - arrival,
            why_plain=max(self.why_plain, key=self.why_plain.__getitem__, default=""),
            cached_tokens=self.cached_tokens,
            cache_note=self.cache_note,
            max_depth=max_depth,
        )

    def snapshot(self, key: str, num_prompt: int, num_output: int) -> StreamSnapshot:
        return StreamSnapshot(
            id=key,
            prompt_tokens=num_prompt,
            output_tokens=num_output,
            depth=self.last_depth,
            draft_tokens=self.num_draft_tokens,
            accepted_tokens=self.num_accepted_tokens,
            first_token_at=self.first_token_at,
            gain=self.gain.factor,
        )


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """The engine at one moment, for any thread to read."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_steps: int = 0
    step_sizes: tuple[int, ...] = ()  # steps by tokens fed: up to each of STEP_SIZES, and more
    num_fed: int = 0  # tokens of all steps
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    finished: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    num_cache_queries: int = 0  # prompt tokens of requests that looked into the prefix cache
    num_cache_hits: int = 0  # of those, tokens that were found
    num_cached_blocks: int = 0  # held by the prefix cache, running rows or not
    num_states: int = 0  # recurrent states that the prefix cache has room for
    num_used_states: int = 0
    depth_reason: str = ""
    last_depth: int = 0  # of most rows in the last step that sampled

    @property
    def acceptance_rate(self) -> float:
        return acceptance_rate(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_accepted_length(self) -> float:
        return mean_accepted_length(self.num_accepted_tokens, self.num_drafts)

    @property
    def tokens_per_step(self) -> float:
        return tokens_per_step(self.num_output_tokens, self.num_drafts, self.num_plain_steps)

    @property
    def draft_share(self) -> float:
        return draft_share(self.num_drafts, self.num_plain_steps)


class EngineCounters(DraftCounters):
    """The counters of the engine since it started."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.step_sizes = [0] * (len(STEP_SIZES) + 1)
        self.num_fed = 0
        self.num_prompt_tokens = 0  # of requests that got their first token
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.finished: Counter[str] = Counter()
        self.num_cache_queries = 0
        self.num_cache_hits = 0

    def count_step(self, num_fed: int) -> None:
        self.num_steps += 1
        self.num_fed += num_fed
        self.step_sizes[bisect_left(STEP_SIZES, num_fed)] += 1

    def freeze(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_free_blocks: int,
        num_used_blocks: int,
        num_cached_blocks: int,
        num_states: int,
        num_used_states: int,
        depth_reason: str,
        last_depth: int,
    ) -> StatsSnapshot:
        return StatsSnapshot(
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=num_free_blocks,
            num_used_blocks=num_used_blocks,
            num_cached_blocks=num_cached_blocks,
            num_states=num_states,
            num_used_states=num_used_states,
            num_cache_queries=self.num_cache_queries,
            num_cache_hits=self.num_cache_hits,
            num_steps=self.num_steps,
            step_sizes=tuple(self.step_sizes),
            num_fed=self.num_fed,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_plain_steps=self.num_plain_steps,
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            finished=MappingProxyType(dict(self.finished)),
            depth_reason=depth_reason,
            last_depth=last_depth,
        )
