"""Counters of drafting and of the engine's work, and their frozen snapshots.

A draft counts when it is verified: drafts that a row still holds when it ends count nowhere. The bonus token (the
row's own sample) is never an accepted draft. Knows no metrics format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


def acceptance_rate(num_accepted: int, num_draft_tokens: int) -> float:
    return num_accepted / num_draft_tokens if num_draft_tokens else 0.0


def mean_accepted_length(num_accepted: int, num_drafts: int) -> float:
    """Tokens a step of a drafting row yields, its own sample included."""
    return 1.0 + num_accepted / num_drafts if num_drafts else 1.0


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
    why_no_draft: str = ""  # set when it never drafted
    depth_reason: str = ""  # the last decision of its policy, and why

    @property
    def acceptance_rate(self) -> float:
        return acceptance_rate(self.accepted_tokens, self.draft_tokens)

    @property
    def mean_accepted_length(self) -> float:
        return mean_accepted_length(self.accepted_tokens, self.drafts)


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
        self.last_depth = 0  # drafts requested when it sampled last
        self.joined_at: float | None = None  # the first time
        self.first_token_at: float | None = None

    def join(self, now: float) -> None:
        self.joined_at = now if self.joined_at is None else self.joined_at

    def freeze(self, num_prompt: int, num_output: int, arrival: float, now: float, depth_reason: str) -> RequestStats:
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
            why_no_draft="" if self.num_drafts else depth_reason,
            depth_reason=depth_reason,
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
    depth_reason: str = ""
    last_depth: int = 0  # of most rows in the last step that sampled

    @property
    def acceptance_rate(self) -> float:
        return acceptance_rate(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_accepted_length(self) -> float:
        return mean_accepted_length(self.num_accepted_tokens, self.num_drafts)


class EngineCounters(DraftCounters):
    """The counters of the engine since it started."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.num_prompt_tokens = 0  # of requests that got their first token
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.finished: Counter[str] = Counter()

    def freeze(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_free_blocks: int,
        num_used_blocks: int,
        depth_reason: str,
        last_depth: int,
    ) -> StatsSnapshot:
        return StatsSnapshot(
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=num_free_blocks,
            num_used_blocks=num_used_blocks,
            num_steps=self.num_steps,
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
