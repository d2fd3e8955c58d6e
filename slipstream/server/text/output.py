"""Token ids -> pieces of text, each with the origin and score of its token; ends at a stop string.

Thinking and tool calls are recognised after this, in markup/.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.load import StreamingDetokenizer, Tokenizer
from slipstream.server.text.pieces import Piece, PieceQueue, Score
from slipstream.server.text.stops import StopFinder


class OutputText:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._finder = StopFinder(stops)
        self._held = PieceQueue()  # text that may still become a stop string
        self._scores: tuple[Score, ...] = ()  # of tokens whose text is not complete yet
        self.num_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._finder.matched

    def push(self, token: int, origin: int, score: Score | None = None) -> list[Piece]:
        """The pieces that are certain now."""
        self._count(score)
        return self._emit(self._detokenizer.push((token,)), origin)

    def finish(self, end: bool = False, score: Score | None = None) -> list[Piece]:
        """The held-back pieces. ``end``: the last token was an end token, which counts but has no text."""
        if end:
            self._count(score)
        pieces = self._emit(self._detokenizer.finish(), 0)
        if self.stop is None:
            self._finder.finish()
            pieces += self._held.take_all()
            pieces += [Piece("", 0, self._scores)] if self._scores else []
        return pieces

    def _count(self, score: Score | None) -> None:
        self.num_tokens += 1
        if score is not None:
            self._scores += (score,)

    def _emit(self, text: str, origin: int) -> list[Piece]:
        if not text:
            return []
        piece, self._scores = Piece(text, origin, self._scores), ()
        if not self._finder.stops:
            return [piece]
        self._held.push((piece,))
        return self._held.take(len(self._finder.push(text)))
