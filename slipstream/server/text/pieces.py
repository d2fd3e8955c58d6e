"""Pieces of text with the origin of their tokens, and a queue for pieces that are held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Score(NamedTuple):
    """A token and its log-probability under the model."""

    raw: bytes  # the token's text
    logprob: float | None  # None: the prompt's first token, which has no context
    top: tuple[tuple[bytes, float], ...] = ()  # the likeliest tokens at this position, best first
    token: int = 0
    top_tokens: tuple[int, ...] = ()  # the ids of `top`


class Piece(NamedTuple):
    text: str
    origin: int  # 0: sampled by the target model; i: accepted draft at draft position i
    scores: tuple[Score, ...] = ()  # of the tokens that begin in this piece, if the request wants logprobs


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


class PieceQueue:
    """Pieces that are held back until their meaning is known. ``text``: their texts joined."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.text = ""

    def push(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._pieces.append(piece)
            self.text += piece.text

    def take(self, count: int) -> list[Piece]:
        """The first ``count`` characters. The last piece may be split; its scores stay with its first half."""
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
    """Length of the longest suffix of the text that is a proper prefix of the marker."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
