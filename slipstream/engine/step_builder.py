"""A step while it is being planned (StepBuilder), and while its result is still to come (InFlight)."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.bounds import Bounds
from slipstream.engine.contract import NO_DRAFTS, DraftRequest, Keep, RowJoin, RowStep, StepPlan, StepResult
from slipstream.engine.request import Sequence
from slipstream.speculate.policy import StepTiming


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

    def launch(self, plan: StepPlan) -> InFlight:
        for scheduled, row in zip(self.rows, plan.rows):
            scheduled.sequence.launch(row, scheduled.why_plain)
        has_prompts = any(row.bounds.num_uncomputed > 1 for row in self.rows)
        return InFlight(plan, tuple(row.sequence for row in self.rows), has_prompts)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result is still to come. Rows are matched by their order: a slot may have a new owner by then."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    has_prompts: bool  # the step reads prompt chunks

    def timing(self, result: StepResult, since_last: float, stops_early: bool) -> StepTiming:
        """``since_last``: seconds between the results of this step and the one before."""
        num_tokens = sum(row.num_fed for row in result.rows)
        depths = [row.draft.depth for row in self.plan.rows]
        if stops_early:
            depths = [len(row.confidences) or depth for depth, row in zip(depths, result.rows)]
        pass_rows = tuple(sum(depth > i for depth in depths) for i in range(max(depths)))
        other = max(0.0, since_last - result.verify_seconds - result.draft_seconds)
        return StepTiming(num_tokens, pass_rows, result.verify_seconds, result.draft_seconds, other, len(result.rows))
