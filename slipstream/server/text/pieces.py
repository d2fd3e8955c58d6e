"""Text in pieces that remember which tokens they came from, and a queue of those that are held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Score(NamedTuple):
    """A token and what the model itself thought of it."""

    raw: bytes  # its text
    logprob: float | None  # None: the prompt's first token, which nothing was expected before
    top: tuple[tuple[bytes, float], ...] = ()  # the likeliest ones in its place, best first


class Piece(NamedTuple):
    text: str
    origin: int  # 0 for an own draw, or the position of the accepted draft
    scores: tuple[Score, ...] = ()  # of the tokens that begin in it, where asked for


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


class PieceQueue:
    """Pieces whose meaning is not decided yet. ``text`` is all of theirs."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.text = ""

    def push(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._pieces.append(piece)
            self.text += piece.text

    def take(self, count: int) -> list[Piece]:
        """Those of the first ``count`` characters; the last one may be cut, its scores stay with its beginning."""
        assert count <= len(self.text)
        self.text = self.text[count:]
        taken: list[Piece] = []
        while self._pieces and len(self._pieces[0].text) <= count:
            piece = self._pieces.popleft()
            taken.append(piece)
            count -= len(piece.text)
        if count:
            text, origin, scores = self._pieces[0]
            taken.append(Piece(text[:count], origin, scores))
            self._pieces[0] = Piece(text[count:], origin)
        return taken

    def take_all(self) -> list[Piece]:
        return self.take(len(self.text))


def overlap(text: str, marker: str) -> int:
    """How many of the text's last characters may be the beginning of the marker; a whole one does not count."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
