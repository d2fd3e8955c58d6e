"""The reader interface: pieces of text in, parts of an answer out.

The parts depend on the text alone, never on how it was split into pieces. Text that may still become a marker is held
back, and no other text is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slipstream.server.text.parts import Part, Text
from slipstream.server.text.pieces import Piece


class Reader(ABC):
    thinking = False  # the next token still belongs to the thinking
    done = False  # the answer is complete; further text is ignored

    @abstractmethod
    def push(self, pieces: Sequence[Piece]) -> list[Part]: ...

    @abstractmethod
    def finish(self) -> list[Part]:
        """The end of the text: returns the held-back parts."""


class PlainReader(Reader):
    """For answers without thinking and tool calls."""

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        return [Text(list(pieces))] if pieces else []

    def finish(self) -> list[Part]:
        return []
