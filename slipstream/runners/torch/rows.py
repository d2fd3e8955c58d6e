"""The host's view of each slot: a stream's tokens, drafts and cursor, and the block table they live in.

A row keeps its slot until it leaves. Its state changes in two places only: join, and commit at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.engine.plan import RowJoin, RowStep
from slipstream.runners.torch.batch import RowSpan
from slipstream.runners.torch.noise import signed64
from slipstream.runners.torch.processors import Processor, inverse_temperature, processors_for


@dataclass(frozen=True, slots=True)
class RowDraw:
    """How a row draws its tokens."""

    greedy: bool
    inv_temperature: float
    seed: int  # as int64
    p_min: float
    num_prompt: int
    may_draft: bool
    processors: tuple[Processor, ...]


@dataclass(slots=True)
class Row:
    slot: int
    tokens: list[int]
    draw: RowDraw
    cursor: int = 0  # tokens whose caches are committed
    drafts: list[int] = field(default_factory=list)
    num_replay: int = 0  # drafts accepted last step: certain by now, but not yet in the recurrent state
    num_blocks: int = 0

    def span(self, feed: int, offset: int) -> RowSpan:
        """What a step that may feed ``feed`` tokens feeds of this row."""
        num_known = len(self.tokens) - self.cursor
        num_fed = min(feed, num_known + len(self.drafts))
        certain = min(num_fed, num_known)
        return RowSpan(self.slot, self.cursor, offset, certain, num_fed - certain, self.num_replay)

    def fed_tokens(self, span: RowSpan) -> list[int]:
        known = self.tokens[span.start : span.start + span.num_certain]
        return known + self.drafts[: span.num_drafts]

    def draws(self, span: RowSpan) -> bool:
        return span.start + span.num_certain == len(self.tokens)

    def commit(self, span: RowSpan, accepted: int, drawn: int | None, drafts: list[int]) -> tuple[int, ...]:
        """Make ``accepted`` drafts and the row's own draw real; returns the new tokens."""
        assert 0 <= accepted <= span.num_drafts
        new = [] if drawn is None else [*self.drafts[:accepted], drawn]
        self.cursor = span.start + span.num_certain + accepted
        self.num_replay = accepted
        self.tokens.extend(new)
        self.drafts = drafts
        return tuple(new)


class RowTable:
    def __init__(self, num_slots: int, blocks_per_slot: int, device: torch.device) -> None:
        self._rows: dict[int, Row] = {}
        self.num_slots = num_slots
        self.block_table: Tensor = torch.zeros(num_slots, blocks_per_slot, dtype=torch.int32, device=device)

    def __getitem__(self, slot: int) -> Row:
        return self._rows[slot]

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self.num_slots
        assert join.slot not in self._rows, f"slot {join.slot} is taken"
        draw = RowDraw(
            join.params.greedy,
            inverse_temperature(join.params),
            signed64(join.seed),
            join.p_min,
            join.num_prompt,
            join.may_draft,
            processors_for(join.params, self.block_table.device),
        )
        self._rows[join.slot] = Row(join.slot, list(join.tokens), draw)

    def leave(self, slot: int) -> None:
        del self._rows[slot]

    def grow(self, step: RowStep) -> None:
        """Append the step's new blocks to its row's table."""
        if not step.blocks:
            return
        row = self._rows[step.slot]
        end = row.num_blocks + len(step.blocks)
        new = torch.tensor(step.blocks, dtype=torch.int32)
        self.block_table[step.slot, row.num_blocks : end] = new.to(self.block_table.device, non_blocking=True)
        row.num_blocks = end
