"""A step while it is being planned: lives for one pass of the scheduler and holds what has been decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import NO_DRAFTS, DraftRequest, RowJoin, RowStep
from slipstream.engine.request import Sequence


@dataclass(slots=True)
class Pick:
    """A row that will run."""

    sequence: Sequence
    bounds: Bounds  # before this step
    feed: int
    draft: DraftRequest = NO_DRAFTS

    @property
    def draws(self) -> bool:
        return self.feed >= self.bounds.gap

    @property
    def after(self) -> Bounds:
        return self.bounds.after(self.step())

    def step(self, blocks: tuple[int, ...] = ()) -> RowStep:
        assert self.sequence.slot is not None
        return RowStep(self.sequence.slot, self.feed, self.draft, blocks)


@dataclass(slots=True)
class Pass:
    budget: int  # tokens the step may still feed
    prompts: int  # of those, tokens of prompts
    picks: list[Pick] = field(default_factory=list)
    joins: list[RowJoin] = field(default_factory=list)
    held: set[Sequence] = field(default_factory=set)  # rows that sit this step out
    starved: bool = False  # blocks ran out: nobody new comes in

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that may still be fed."""
        return min(self.budget, self.prompts)

    def may_place(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and sequence not in self.held

    def place(self, sequence: Sequence, bounds: Bounds, feed: int) -> None:
        assert 1 <= feed <= self.budget
        self.budget -= feed
        if bounds.gap > 1:
            self.prompts -= feed
        self.picks.append(Pick(sequence, bounds, feed))
