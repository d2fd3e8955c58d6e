"""The parts of an answer, the same for every protocol: thinking, text, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.server.text.json_text import strict_json
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
    """The start of a tool call, or a further chunk of its arguments; after merging, the complete call."""

    name: str | None  # None: more arguments of the call before
    arguments: str = ""  # a chunk of JSON text
    id: str = field(default="", compare=False)  # random; protocols put a prefix before it. "": not the start

    def arguments_object(self) -> dict[str, Any]:
        """For protocols that require an object; the arguments of an unfinished call as {"unfinished": text}."""
        try:
            found = strict_json(self.arguments or "{}")
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"unfinished": self.arguments}


Part = Text | Thinking | Call


def continues(part: Part, kind: type[Part] | None) -> bool:
    """Whether the part extends the previous one, which was of that kind."""
    return kind is type(part) and not (isinstance(part, Call) and part.name is not None)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Adjacent parts of the same kind merged."""
    if len(parts) < 2:
        return list(parts)
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if not continues(part, type(last) if last is not None else None):
            found.append(part if isinstance(part, Call) else type(part)(list(part.pieces)))
        elif isinstance(part, Call):
            assert isinstance(last, Call)
            found[-1] = replace(last, arguments=last.arguments + part.arguments)
        else:
            assert isinstance(last, (Text, Thinking))
            last.pieces.extend(part.pieces)  # a copy made above
    return found
