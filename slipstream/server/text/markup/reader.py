"""Readers: pieces of text in, parts of an answer out, one interface.

What a reader tells depends on the text alone, never on how it was cut into pieces. Nothing is told that may still
become a marker, and nothing is held back longer than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slipstream.server.text.parts import Part, Text
from slipstream.server.text.pieces import Piece


class Reader(ABC):
    thinking = False  # what comes next still belongs to the thinking
    done = False  # nothing behind this is wanted

    @abstractmethod
    def push(self, pieces: Sequence[Piece]) -> list[Part]: ...

    @abstractmethod
    def finish(self) -> list[Part]:
        """The text is over."""


class PlainReader(Reader):
    """All of it is text."""

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        return [Text(list(pieces))] if pieces else []

    def finish(self) -> list[Part]:
        return []
