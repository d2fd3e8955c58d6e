"""Separates `<think>` ... `</think>` from the answer and drops the markers and the space around them."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.text.markup.reader import Reader
from slipstream.server.text.parts import Part, Thinking
from slipstream.server.text.pieces import Piece, PieceQueue, overlap

BEGIN, END = "<think>", "</think>"


class ThinkingReader(Reader):
    """``started``: the prompt already contains `<think>`. The text after the thinking goes to the inner reader."""

    def __init__(self, inner: Reader, started: bool) -> None:
        self._inner = inner
        self._held = PieceQueue()
        self._step = self._think if started else self._before
        self._emitted = False
        self.thinking = started

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self._inner.done

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        if self._step == self._after:
            return self._inner.push(pieces)
        self._held.push(pieces)
        return self._step()

    def finish(self) -> list[Part]:
        rest = self._held.take_all()
        if self.thinking:
            return [*self._thought(rest), *self._inner.finish()]
        return [*self._inner.push(rest), *self._inner.finish()]

    def _before(self) -> list[Part]:
        """Thinking can only be at the beginning of an answer."""
        text = self._held.text.lstrip()
        if text.startswith(BEGIN):
            self._held.take(self._held.text.index(BEGIN) + len(BEGIN))
            self._step, self.thinking = self._think, True
            return self._think()
        if BEGIN.startswith(text):
            return []
        self._step = self._after
        return self._after()

    def _think(self) -> list[Part]:
        if not self._emitted:
            self._trim()
        text = self._held.text
        end = text.find(END)
        if end < 0:
            certain = text[: len(text) - overlap(text, END)].rstrip()
            return self._thought(self._held.take(len(certain)))
        parts = self._thought(self._held.take(len(text[:end].rstrip())))
        self._held.take(self._held.text.index(END) + len(END))
        self._step, self.thinking = self._gap, False
        return parts + self._gap()

    def _gap(self) -> list[Part]:
        self._trim()
        if not self._held.text:
            return []
        self._step = self._after
        return self._after()

    def _after(self) -> list[Part]:
        return self._inner.push(self._held.take_all())

    def _trim(self) -> None:
        self._held.take(len(self._held.text) - len(self._held.text.lstrip()))

    def _thought(self, pieces: list[Piece]) -> list[Part]:
        self._emitted = self._emitted or bool(pieces)
        return [Thinking(pieces)] if pieces else []
