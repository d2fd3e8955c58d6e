"""What an answer consists of, as every protocol tells it: thinking, text, calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.server.text.pieces import Piece, text_of


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


def goes_on(part: Part, kind: type[Part] | None) -> bool:
    """Whether it belongs to what was being told, of that kind."""
    return kind is type(part) and not (isinstance(part, Call) and part.name is not None)


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same with neighbours of one kind put together."""
    if len(parts) < 2:
        return list(parts)
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if not goes_on(part, type(last) if last is not None else None):
            found.append(part if isinstance(part, Call) else type(part)(list(part.pieces)))
        elif isinstance(part, Call):
            assert isinstance(last, Call)
            found[-1] = Call(last.name, last.arguments + part.arguments)
        else:
            assert isinstance(last, (Text, Thinking))
            last.pieces.extend(part.pieces)  # a list that was made here
    return found
