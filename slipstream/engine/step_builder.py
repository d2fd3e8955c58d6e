"""A step while it is being planned (StepBuilder), and while its result is still to come (InFlight)."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import NO_DRAFTS, DraftRequest, Keep, RowJoin, RowStep, StepPlan, StepResult
from slipstream.engine.request import Sequence
from slipstream.speculate.cost_model import Decoding, StepTiming


@dataclass(slots=True)
class ScheduledRow:
    """A row that will run."""

    sequence: Sequence
    bounds: Bounds  # before this step
    feed: int
    draft: DraftRequest = NO_DRAFTS
    keeps: tuple[Keep, ...] = ()
    why_plain: str = ""  # why it proposes no drafts, if it samples

    @property
    def context(self) -> int:
        """KV tokens before those that it feeds."""
        return self.bounds.max_computed

    @property
    def is_prompt(self) -> bool:
        return self.bounds.num_uncomputed > 1

    @property
    def samples(self) -> bool:
        return self.feed >= self.bounds.num_uncomputed

    @property
    def after(self) -> Bounds:
        return self.bounds.after(self.step())

    def step(self, blocks: tuple[int, ...] = ()) -> RowStep:
        assert self.sequence.slot is not None
        return RowStep(self.sequence.slot, self.feed, self.draft, blocks, self.keeps)


@dataclass(slots=True)
class StepBuilder:
    """Lives for one call of ``schedule`` and holds its decisions so far."""

    budget: int  # tokens the step may still feed
    prompt_budget: int = 0  # of those, tokens of prompts
    rows: list[ScheduledRow] = field(default_factory=list)
    joins: list[RowJoin] = field(default_factory=list)
    held: set[Sequence] = field(default_factory=set)  # rows that skip this step
    starved: bool = False  # blocks ran out: nobody is admitted

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that may still be fed."""
        return min(self.budget, self.prompt_budget)

    @property
    def decoding(self) -> Decoding:
        """Of the rows so far. As many draft as hold drafts now."""
        return _decoding([(row, row.feed, row.feed - 1) for row in self.rows if not row.is_prompt])

    def may_run(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and sequence not in self.held

    def add(self, sequence: Sequence, bounds: Bounds, feed: int) -> None:
        assert 1 <= feed <= self.budget
        self.budget -= feed
        if bounds.num_uncomputed > 1:
            self.prompt_budget -= feed
        self.rows.append(ScheduledRow(sequence, bounds, feed))

    def add_chunk(self, sequence: Sequence, bounds: Bounds, largest: int) -> None:
        """Of its prompt, at most so many tokens. The last one is fed when the children are there to feed theirs."""
        feed = min(bounds.num_uncomputed - bool(sequence.children), largest)
        if feed:
            self.add(sequence, bounds, feed)

    def launch(self, plan: StepPlan) -> InFlight:
        for scheduled, row in zip(self.rows, plan.rows):
            scheduled.sequence.launch(row, scheduled.why_plain)
        return InFlight(plan, tuple(self.rows))


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is still to come. Rows are matched by their order: a slot may have a new owner by then."""

    plan: StepPlan
    rows: tuple[ScheduledRow, ...]

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(row.sequence for row in self.rows)

    @property
    def has_prompts(self) -> bool:
        """The step reads prompt chunks."""
        return any(row.is_prompt for row in self.rows)

    def timing(self, result: StepResult, since_last: float, stops_early: bool) -> StepTiming:
        """Of a step without prompts. ``since_last``: seconds between its result and the one before."""
        depths = [row.draft.depth for row in self.rows]
        if stops_early:
            depths = [len(row.confidences) or depth for depth, row in zip(depths, result.rows)]
        own = result.verify_seconds + result.draft_seconds + result.late_seconds
        other = max(0.0, since_last - own)
        decoding = _decoding(list(zip(self.rows, (row.num_fed for row in result.rows), depths)))
        return StepTiming(decoding, result.verify_seconds, result.draft_seconds, other)


def _decoding(rows: list[tuple[ScheduledRow, int, int]]) -> Decoding:
    """Of rows, the tokens that each feeds, and how deep it drafts."""
    depths = [depth for _, _, depth in rows]
    drafting = [row.context for row, _, depth in rows if depth]
    passes = tuple(sum(depth > i for depth in depths) for i in range(max(depths, default=0)))
    mean = sum(drafting) / len(drafting) if drafting else 0.0
    return Decoding(
        num_tokens=sum(feed for _, feed, _ in rows),
        num_rows=len(rows),
        context=sum(row.context for row, _, _ in rows),
        draft_kv=sum((feed - 1) * row.context for row, feed, _ in rows),
        pass_rows=passes,
        draft_context=mean,
    )
