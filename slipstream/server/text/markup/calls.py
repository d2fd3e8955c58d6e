"""Finds `<tool_call>` ... `</tool_call>` in an answer. The text between the markers is parsed by a ToolCallParser."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.server.text.markup.reader import Reader
from slipstream.server.text.parts import Call, Part, Text
from slipstream.server.text.pieces import Piece, PieceQueue, overlap, text_of

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A complete call: what clients receive of it, and the text that the model wrote between the markers."""

    id: str
    name: str
    arguments: str  # JSON
    text: str

    @property
    def size(self) -> int:
        return len(self.name) + len(self.arguments) + len(self.text)


class ToolCallParser(ABC):
    """Parses one call, from the text after its BEGIN marker. Returns the name as soon as it is certain."""

    failed = False  # not a call, but ordinary text; only before the name was returned
    rest: str | None = None  # the text after the END marker, once that was read

    @abstractmethod
    def push(self, text: str) -> list[Call]: ...


OnCall = Callable[[SampledCall], None]


def ignore_call(call: SampledCall) -> None:
    return


class ToolCallReader(Reader):
    """``parallel``: more than one call is allowed. White space around calls is dropped.

    ``on_call`` is given every complete call.
    """

    def __init__(
        self, make_parser: Callable[[], ToolCallParser], parallel: bool = True, on_call: OnCall = ignore_call
    ) -> None:
        self._make_parser, self._parallel, self._on_call = make_parser, parallel, on_call
        self._parser: ToolCallParser | None = None  # of the current call
        self._named = False  # its name was emitted: it can no longer turn out to be text
        self._marker = 0  # where the current call begins in the held text, after space and marker
        self._unread = ""  # text of the current call that its parser has not seen
        self._read: list[str] = []  # text of the current call that its parser has seen
        self._emitted: list[Call] = []  # its parts so far
        self._held = PieceQueue()  # outside a call: a possible marker. Inside: a call without a name so far
        self._between = False  # after a call, with no text since

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        parts: list[Part] = []
        if self.done:
            return parts
        self._held.push(pieces)
        self._unread += text_of(pieces)
        while self._outside(parts) if self._parser is None else self._inside(self._parser, parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """An unfinished call keeps the arguments it has; one without a name is text."""
        rest = self._held.take_all()
        if self.done or (self._between and not text_of(rest).strip()):
            return []
        return [Text(rest)] if rest else []

    def _outside(self, parts: list[Part]) -> bool:
        """Reads text up to the next call. True if a call begins."""
        if self._between:
            self._held.take(len(self._held.text) - len(self._held.text.lstrip()))
        text = self._held.text
        begin = text.find(BEGIN)
        certain = text[: len(text) - overlap(text, BEGIN)] if begin < 0 else text[:begin]
        self._emit_text(self._held.take(len(certain.rstrip())), parts)
        if begin < 0:
            return False
        self._marker = self._held.text.index(BEGIN) + len(BEGIN)
        self._parser, self._named, self._unread = self._make_parser(), False, self._held.text[self._marker :]
        self._read, self._emitted = [], []
        return True

    def _emit_text(self, pieces: list[Piece], parts: list[Part]) -> None:
        if pieces:
            self._between = False
            parts.append(Text(pieces))

    def _inside(self, parser: ToolCallParser, parts: list[Part]) -> bool:
        """Reads the current call. True if it is complete, or was not a call, and text may follow."""
        self._read.append(self._unread)
        calls = [_with_id(call) for call in parser.push(self._unread)]
        self._emitted += calls
        parts += calls
        self._unread, self._named = "", self._named or bool(calls)
        if parser.failed:
            assert not self._named
            self._parser = None
            self._emit_text(self._held.take(self._marker), parts)
            return True
        if parser.rest is not None:
            self._held.take(len(self._held.text) - len(parser.rest))
            self._complete("".join(self._read).removesuffix(END + parser.rest))
            self._parser, self._between, self.done = None, True, not self._parallel
            return self._parallel
        if self._named:
            self._held.take_all()
        return False

    def _complete(self, text: str) -> None:
        start = self._emitted[0]
        assert start.name is not None
        arguments = "".join(call.arguments for call in self._emitted)
        self._on_call(SampledCall(start.id, start.name, arguments, text))


def _with_id(call: Call) -> Call:
    return call if call.name is None else replace(call, id=secrets.token_hex(12))
