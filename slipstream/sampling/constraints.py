"""What may follow what: constraints on the output, told as masks over the vocabulary.

A Constraint is compiled once and shared; a Matcher walks one stream's output through it. Runners ask a matcher for the
masks of a row's positions, assuming the drafts before each, and move it by committed tokens only. Knows no array
library: a mask is bytes, one bit a token, the lowest bit of the first byte being token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """What is allowed at the next position and behind each draft: ``len(drafts) + 1`` masks; None allows all.

        Does not move the matcher. Behind a draft that is not allowed itself anything may stand. Raises
        ConstraintFault where the constraint cannot be followed any further; the row then ends with that error.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """These were committed."""


class Constraint(Protocol):
    def start(self) -> Matcher:
        """A matcher that stands before the first token of the output."""
        ...
