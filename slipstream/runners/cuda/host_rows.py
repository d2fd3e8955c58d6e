"""The host's knowledge of the rows that live on the device, by slot.

While a step is in flight the host knows neither a row's cursor nor its drafts. It knows what no verdict changes: how
many known tokens are left to compute once all submitted steps are done, and an upper bound of their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.contract import MAX_KEEPS, NO_DRAFTS, DraftRequest, Keep, RowJoin, RowStep
from slipstream.errors import ConstraintFault
from slipstream.runners.logprobs import LogprobRequest, logprobs_of
from slipstream.runners.rows import matcher_of
from slipstream.sampling.constraints import Matcher
from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowFeed:
    """A row's part of a step, as far as the host knows it.

    The device feeds ``min(feed, known + drafts - cursor)`` tokens (kernels/step.py). Known tokens come first, so how
    many of them are fed does not depend on the drafts: only ``feed`` and ``num_samples`` are upper bounds.
    """

    slot: int
    feed: int
    num_uncomputed: int = 1  # known tokens not computed before this step
    draft: DraftRequest = NO_DRAFTS
    keeps: tuple[Keep, ...] = ()  # the device knows which of them this step passes

    @property
    def num_before(self) -> int:
        """Tokens fed before the first position that is sampled."""
        return min(self.feed, self.num_uncomputed - 1)

    @property
    def num_samples(self) -> int:
        return self.feed - self.num_before

    @property
    def num_drafts(self) -> int:
        return max(0, self.feed - self.num_uncomputed)

    @property
    def num_left(self) -> int:
        """Known tokens not computed after this step: one is the row's own sample."""
        return 1 if self.num_samples else self.num_uncomputed - self.feed


@dataclass(slots=True)
class ConstraintState:
    """A row's matcher and the drafts that follow its position."""

    matcher: Matcher
    drafts: tuple[int, ...] = ()  # of the newest report
    fault: str = ""

    def advance(self, tokens: Sequence[int], drafts: tuple[int, ...]) -> None:
        self.matcher.advance(tokens)
        self.drafts = drafts

    def masks(self, num_drafts: int) -> list[bytes | None]:
        """At its next position and after each draft, as far as they can be followed; none where it cannot go on."""
        try:
            return self.matcher.masks(self.drafts[:num_drafts])
        except ConstraintFault as fault:
            self.fault = str(fault)
            return []

    def mask_after(self, tokens: Sequence[int]) -> bytes | None:
        """At the position after tokens that are about to be committed; None: all is allowed, or nothing is known."""
        masks = self.matcher.masks(tokens)
        return masks[-1] if len(masks) > len(tokens) else None


@dataclass(slots=True)
class HostRow:
    """A stream in its slot. A step in flight holds the row itself, so nothing mixes it up with the slot's next one."""

    slot: int
    num_uncomputed: int  # known tokens not computed, once all submitted steps are done
    max_known: int  # no more tokens are known then
    plain: bool  # its next token is the largest logit, as the model gives it
    may_draft: bool
    p_min: float
    logprobs: LogprobRequest
    constraint: ConstraintState | None = None
    num_blocks: int = 0

    def feed(self, step: RowStep) -> RowFeed:
        """Its part of a step, which counts as submitted."""
        assert len(step.keeps) <= MAX_KEEPS
        part = RowFeed(self.slot, step.feed, self.num_uncomputed, step.draft, step.keeps)
        self.num_uncomputed = part.num_left
        self.max_known += part.num_samples
        return part

    def num_confidences(self, part: RowFeed, num_drafts: int) -> int:
        """How many the step's result has: of its drafts and, where confidence ended them, of the one left out."""
        if not part.num_samples or not (part.draft.measures or self.p_min):
            return 0
        return min(num_drafts + 1, part.draft.depth)

    def commit(self, part: RowFeed, num_tokens: int) -> None:
        """The step is collected: it made this many tokens known."""
        self.max_known -= part.num_samples - num_tokens


class HostRows:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, HostRow] = {}  # by slot

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, slot: int) -> HostRow:
        return self._rows[slot]

    def join(self, join: RowJoin) -> None:
        assert join.slot not in self._rows, f"slot {join.slot} is taken"
        matcher = matcher_of(join, self._vocab_size)
        self._rows[join.slot] = HostRow(
            slot=join.slot,
            num_uncomputed=len(join.tokens) - join.start.num_computed,
            max_known=len(join.tokens),
            plain=is_plain(join.params),
            may_draft=join.may_draft,
            p_min=join.p_min,
            logprobs=logprobs_of(join),
            constraint=None if matcher is None else ConstraintState(matcher),
        )

    def leave(self, slot: int) -> None:
        del self._rows[slot]

    def append_blocks(self, joins: Sequence[RowJoin], steps: Sequence[RowStep]) -> list[tuple[int, int, int]]:
        """Slot, index in its block table and block, of all that a plan appends."""
        appended = []
        sources = [(join.slot, join.start.blocks) for join in joins] + [(step.slot, step.blocks) for step in steps]
        for slot, blocks in sources:
            row = self._rows[slot]
            appended += [(slot, row.num_blocks + i, block) for i, block in enumerate(blocks)]
            row.num_blocks += len(blocks)
        return appended


def is_plain(params: SamplingParams) -> bool:
    return params.greedy and not params.needs_history and not params.logit_bias
