"""The host's view of a stream in its slot: its tokens, drafts and cursor, and the tokens that a step feeds.

A row keeps its slot until it leaves. It changes in two places only: when it joins, and by commit at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.contract import DraftRequest, RowJoin, RowResult, RowStep
from slipstream.errors import ConstraintFault
from slipstream.runners.logprobs import NO_LOGPROBS, LogprobRequest, logprobs_of
from slipstream.runners.rows import RowSpan, matcher_of
from slipstream.sampling.constraints import Matcher


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row samples its tokens."""

    greedy: bool
    inv_temperature: float
    seed: int  # 64 bits, unsigned
    processors: tuple[Any, ...] = ()  # the library's logits processors, applied before the masks
    truncation: tuple[Any, ...] = ()  # applied after the masks


GREEDY = RowSampling(greedy=True, inv_temperature=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying one row."""

    num_accepted: int  # drafts
    sampled: int  # the target's own token after them


@dataclass(frozen=True, slots=True)
class Proposal:
    """A row's new drafts."""

    drafts: tuple[int, ...] = ()
    # The drafter's probability of each draft and of the first one left out, if there was one; () if not measured.
    confidences: tuple[float, ...] = ()


NO_PROPOSAL = Proposal()


@dataclass(slots=True)
class Row:
    slot: int
    tokens: list[int]
    sampling: RowSampling
    num_prompt: int = 0
    p_min: float = 0.0  # a draft less likely than this is left out
    may_draft: bool = True
    cursor: int = 0  # tokens whose caches are committed
    drafts: list[int] = field(default_factory=list)
    num_replay: int = 0  # drafts accepted last step: committed, but not yet in the recurrent state
    matcher: Matcher | None = None  # the constraints on its choice
    fault: str = ""  # why it cannot go on; it is computed until it leaves, and reports nothing any more
    logprobs: LogprobRequest = NO_LOGPROBS

    def span(self, step: RowStep, offset: int) -> RowSpan:
        """The tokens of this row in a step."""
        num_known = len(self.tokens) - self.cursor
        num_fed = min(step.feed, num_known + len(self.drafts))
        assert num_fed > 0, f"slot {self.slot} was planned with nothing to feed"
        committed = min(num_fed, num_known)
        before, after = self.cursor - self.num_replay, self.cursor + committed
        keeps = tuple(keep for keep in step.keeps if before < keep.position <= after)
        return RowSpan(self.slot, self.cursor, offset, committed, num_fed - committed, self.num_replay, keeps)

    def fed_tokens(self, span: RowSpan) -> list[int]:
        known = self.tokens[span.start : span.start + span.num_committed]
        return known + self.drafts[: span.num_drafts]

    def samples(self, span: RowSpan) -> bool:
        return span.start + span.num_committed == len(self.tokens)

    def masks(self, num_drafts: int) -> list[bytes | None]:
        """For its next position and after each draft, as far as the matcher can follow; [] if it cannot go on."""
        if self.matcher is None:
            return [None] * (num_drafts + 1)
        try:
            return self.matcher.masks(self.drafts[:num_drafts])
        except ConstraintFault as fault:
            self.fault = str(fault)
            return []

    def num_prompt_logprobs(self, span: RowSpan) -> int:
        """Prompt tokens that get a log-probability in this step: those that follow a fed one."""
        if self.logprobs.prompt_logprobs is None:
            return 0
        return max(0, min(span.start + span.num_fed, self.num_prompt - 1) - span.start)

    def commit(self, span: RowSpan, verdict: Verdict | None, drafts: Sequence[int]) -> tuple[int, ...]:
        """Make the accepted drafts and the row's own sample real; returns the new tokens."""
        accepted = 0 if verdict is None else verdict.num_accepted
        assert 0 <= accepted <= span.num_drafts
        new = [] if verdict is None else [*self.drafts[:accepted], verdict.sampled]
        self.cursor = span.start + span.num_committed + accepted
        self.num_replay = accepted
        self.tokens.extend(new)
        self.drafts = list(drafts)
        if self.matcher is not None:
            self.matcher.advance(new)
        return tuple(new)


@dataclass(frozen=True, slots=True)
class CommittedRow:
    """A row's part of a step, as a drafter sees it."""

    span: RowSpan
    num_kept: int  # of its fed tokens: not the rejected drafts
    next_tokens: list[int]  # the token after each fed one; after a rejected draft any
    drafts_now: bool  # it is asked for drafts after this step
    may_draft: bool = True  # False: it never is


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row that is asked for drafts."""

    row: Row
    request: DraftRequest
    verdict: Verdict
    cursor: int  # after this step's commit


def join_row(join: RowJoin, vocab_size: int, processors: tuple[Any, ...], truncation: tuple[Any, ...]) -> Row:
    """The row of a stream that enters its slot."""
    params = join.params
    return Row(
        slot=join.slot,
        tokens=list(join.tokens),
        sampling=RowSampling(params.greedy, params.inverse_temperature, join.seed, processors, truncation),
        num_prompt=join.num_prompt,
        p_min=join.p_min,
        may_draft=join.may_draft,
        cursor=join.start.num_computed,
        matcher=matcher_of(join, vocab_size),
        logprobs=logprobs_of(join),
    )


def spans_of(rows: Sequence[Row], steps: Sequence[RowStep]) -> tuple[RowSpan, ...]:
    """The rows of a step one after the other in flat arrays."""
    spans: list[RowSpan] = []
    offset = 0
    for row, step in zip(rows, steps, strict=True):
        span = row.span(step, offset)
        spans.append(span)
        offset += span.num_fed
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step that sample, and where. A row samples after its last known token and after each draft."""

    index: list[int]  # in the plan's rows
    rows: list[Row]
    spans: list[RowSpan]

    @property
    def flat(self) -> list[int]:
        """Indices of all sampling positions in flat arrays."""
        return [span.offset + j for span in self.spans for j in range(span.num_committed - 1, span.num_fed)]

    @property
    def positions(self) -> list[int]:
        """Of the sampled tokens in their rows."""
        return [
            len(row.tokens) + j
            for row, span in zip(self.rows, self.spans, strict=True)
            for j in range(span.num_drafts + 1)
        ]


def sampling_rows(rows: Sequence[Row], spans: Sequence[RowSpan]) -> SamplingRows:
    index = [i for i, (row, span) in enumerate(zip(rows, spans, strict=True)) if row.samples(span)]
    return SamplingRows(index, [rows[i] for i in index], [spans[i] for i in index])


def commit_rows(
    rows: Sequence[Row], spans: Sequence[RowSpan], outcomes: dict[int, tuple[Verdict, Proposal]]
) -> tuple[RowResult, ...]:
    """End a step. ``outcomes``: of the rows that sampled, by their index; the others only read."""
    results = []
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        verdict, proposal = outcomes.get(i, (None, NO_PROPOSAL))
        tokens = row.commit(span, verdict, proposal.drafts)
        if row.fault:
            results.append(RowResult(row.slot, span.num_fed, (), (), fault=row.fault))
        else:
            results.append(RowResult(row.slot, span.num_fed, tokens, proposal.drafts, proposal.confidences))
    return tuple(results)
