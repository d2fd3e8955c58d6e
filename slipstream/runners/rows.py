"""What every runner knows of a row: its span in a step, and the matcher of its constraints."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.contract import Keep, RowJoin
from slipstream.sampling.constraints import Matcher
from slipstream.sampling.matcher import matcher_for


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The tokens that one row feeds in a step, and where they lie."""

    slot: int
    start: int  # position of its first fed token: its cursor
    offset: int  # of that token in flat arrays
    num_committed: int  # known tokens fed
    num_drafts: int = 0  # drafts fed after them
    num_replay: int = 0  # drafts accepted last step, whose recurrent inputs lie on the tape
    keeps: tuple[Keep, ...] = ()  # those that its committed state passes in this step

    @property
    def num_fed(self) -> int:
        return self.num_committed + self.num_drafts

    @property
    def kept_states(self) -> list[tuple[int, int]]:
        """For each state that is kept: after how many replayed and committed tokens, and the state slot."""
        before = self.start - self.num_replay
        return [(keep.position - before, keep.state) for keep in self.keeps if keep.state is not None]


def matcher_of(join: RowJoin, vocab_size: int) -> Matcher | None:
    """It stands after the output that a preempted stream brings along."""
    matcher = matcher_for(join.params, join.end_tokens, vocab_size)
    if matcher is not None:
        matcher.advance(join.tokens[join.num_prompt :])
    return matcher
