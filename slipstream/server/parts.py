"""What an answer consists of, as every protocol tells it: thinking, text, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.server.pieces import Piece, text_of


@dataclass(frozen=True, slots=True)
class Text:
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass(frozen=True, slots=True)
class Thinking:
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins, or, behind its beginning, more of its arguments. Whole: both at once."""

    name: str | None  # None: it goes on
    arguments: str = ""  # a piece of JSON text


Part = Text | Thinking | Call


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind put together."""
    found: list[Part] = []
    for part in parts:
        match (found[-1] if found else None, part):
            case (Text(before), Text(more)):
                found[-1] = Text(before + more)
            case (Thinking(before), Thinking(more)):
                found[-1] = Thinking(before + more)
            case (Call(name, begun), Call(None, rest)):
                found[-1] = Call(name, begun + rest)
            case _:
                found.append(part)
    return found
