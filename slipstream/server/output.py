"""Token ids -> the pieces of text a client may see, each with the origin of its token; stop strings end it.

The layer where text gets a meaning: what reads tools or thinking out of it will stand here, behind the stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.load import StreamingDetokenizer, Tokenizer
from slipstream.server.stops import StopFinder

Piece = tuple[str, int]  # text, and 0 for an own draw or the position of the accepted draft


class OutputText:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._finder = StopFinder(stops)
        self._held: list[Piece] = []  # pieces the finder may still hold back
        self.num_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._finder.matched

    def push(self, tokens: Iterable[int], origins: Iterable[int]) -> list[Piece]:
        """What may be told now. Tokens behind the one that completes a stop string do not count."""
        told: list[Piece] = []
        for token, origin in zip(tokens, origins):
            self.num_tokens += 1
            told += self._tell(self._detokenizer.push((token,)), origin)
            if self.stop is not None:
                break
        return told

    def count_end(self) -> None:
        """An end token counts, but has no text."""
        self.num_tokens += 1

    def finish(self) -> list[Piece]:
        if self.stop is not None:
            return []
        told = self._tell(self._detokenizer.finish(), 0)
        return told if self.stop is not None else told + self._release(self._finder.finish())

    def _tell(self, text: str, origin: int) -> list[Piece]:
        if not text:
            return []
        self._held.append((text, origin))
        return self._release(self._finder.push(text))

    def _release(self, text: str) -> list[Piece]:
        """The held pieces that make up this text; the last one may be cut."""
        pieces: list[Piece] = []
        left = len(text)
        while left:
            piece, origin = self._held[0]
            pieces.append((piece[:left], origin))
            if len(piece) > left:
                self._held[0] = (piece[left:], origin)
                break
            self._held.pop(0)
            left -= len(piece)
        return pieces
