"""A step while it is being planned: lives for one call of ``schedule`` and holds the decisions so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import NO_DRAFTS, DraftRequest, RowJoin, RowStep
from slipstream.engine.request import Sequence


@dataclass(slots=True)
class ScheduledRow:
    """A row that will run."""

    sequence: Sequence
    bounds: Bounds  # before this step
    feed: int
    draft: DraftRequest = NO_DRAFTS

    @property
    def samples(self) -> bool:
        return self.feed >= self.bounds.num_uncomputed

    @property
    def after(self) -> Bounds:
        return self.bounds.after(self.step())

    def step(self, blocks: tuple[int, ...] = ()) -> RowStep:
        assert self.sequence.slot is not None
        return RowStep(self.sequence.slot, self.feed, self.draft, blocks)


@dataclass(slots=True)
class StepBuilder:
    budget: int  # tokens the step may still feed
    prompt_budget: int  # of those, tokens of prompts
    rows: list[ScheduledRow] = field(default_factory=list)
    joins: list[RowJoin] = field(default_factory=list)
    held: set[Sequence] = field(default_factory=set)  # rows that skip this step
    starved: bool = False  # blocks ran out: nobody is admitted

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that may still be fed."""
        return min(self.budget, self.prompt_budget)

    def may_run(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and sequence not in self.held

    def add(self, sequence: Sequence, bounds: Bounds, feed: int) -> None:
        assert 1 <= feed <= self.budget
        self.budget -= feed
        if bounds.num_uncomputed > 1:
            self.prompt_budget -= feed
        self.rows.append(ScheduledRow(sequence, bounds, feed))
