"""Stop strings: text is held back while it may be the beginning of one.

The match that ends first counts; of several that end together, the longest. The result depends on the text alone, not
on the chunks in which it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.text.pieces import overlap


class StopFinder:
    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self.stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to precede any stop string. Not to be called after a match."""
        assert self.matched is None
        self._held += text
        if found := self._first_match():
            start, self.matched = found
            text, self._held = self._held[:start], ""
            return text
        keep = max((overlap(self._held, stop) for stop in self.stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self) -> str:
        """The end of the text: returns the held-back text, which was not a stop string."""
        text, self._held = self._held, ""
        return text

    def _first_match(self) -> tuple[int, str] | None:
        starts = [(self._held.find(stop), stop) for stop in self.stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None
