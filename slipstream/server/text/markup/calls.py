"""`<tool_call>` ... `</tool_call>` in an answer: where calls begin and end. What stands inside is a form's to read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from slipstream.server.text.markup.reader import Reader
from slipstream.server.text.parts import Call, Part, Text
from slipstream.server.text.pieces import Piece, PieceQueue, overlap, text_of

BEGIN, END = "<tool_call>", "</tool_call>"


class CallForm(ABC):
    """Reads one call from behind its BEGIN marker. As soon as the name is sure, it is told."""

    failed = False  # this is no call: it was text all along. Only before the name was told
    rest: str | None = None  # behind the END marker, once that came

    @abstractmethod
    def push(self, text: str) -> list[Call]: ...


class CallReader(Reader):
    """``parallel``: there may be further calls behind the first. Space around calls is nobody's."""

    def __init__(self, form: Callable[[], CallForm], parallel: bool = True) -> None:
        self._make_form, self._parallel = form, parallel
        self._form: CallForm | None = None  # of the call that is being read
        self._named = False  # its name was told: it cannot turn out to be text any more
        self._marker = 0  # where what is held of it begins, behind space and marker
        self._unread = ""  # of it
        self._held = PieceQueue()  # outside: what may become a marker. Inside: all of a call that is not named yet
        self._between = False  # a call came before, and no text since

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        told: list[Part] = []
        if self.done:
            return told
        self._held.push(pieces)
        self._unread += text_of(pieces)
        while self._outside(told) if self._form is None else self._inside(self._form, told):
            pass
        return told

    def finish(self) -> list[Part]:
        """A call that was not finished stays as far as it came; one without a name was text."""
        rest = self._held.take_all()
        if self.done or (self._between and not text_of(rest).strip()):
            return []
        return [Text(rest)] if rest else []

    def _outside(self, told: list[Part]) -> bool:
        """True: a call begins."""
        if self._between:
            self._held.take(len(self._held.text) - len(self._held.text.lstrip()))
        text = self._held.text
        begin = text.find(BEGIN)
        sure = text[: len(text) - overlap(text, BEGIN)] if begin < 0 else text[:begin]
        self._say(self._held.take(len(sure.rstrip())), told)
        if begin < 0:
            return False
        self._marker = self._held.text.index(BEGIN) + len(BEGIN)
        self._form, self._named, self._unread = self._make_form(), False, self._held.text[self._marker :]
        return True

    def _say(self, pieces: list[Piece], told: list[Part]) -> None:
        if pieces:
            self._between = False
            told.append(Text(pieces))

    def _inside(self, form: CallForm, told: list[Part]) -> bool:
        """True: the call is over, or was none."""
        calls = form.push(self._unread)
        told += calls
        self._unread, self._named = "", self._named or bool(calls)
        if form.failed:
            assert not self._named
            self._form = None
            self._say(self._held.take(self._marker), told)
            return True
        if form.rest is not None:
            self._held.take(len(self._held.text) - len(form.rest))
            self._form, self._between, self.done = None, True, not self._parallel
            return self._parallel
        if self._named:
            self._held.take_all()
        return False
