"""Constraints of models that think before they answer. Thinking begins with the output and ends after a marker.

``AllOf((ThinkingBudget(...), AfterThinking(...)))`` is both: a budget, and a grammar that starts where thinking ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from slipstream.errors import ConstraintFault
from slipstream.sampling.constraints import Constraint, Matcher, StateMatcher
from slipstream.sampling.masks import all_but, only

Run = tuple[int, ...]


def _last(tail: Run, token: int, count: int) -> Run:
    """The last ``count`` tokens once this one has come."""
    tail = (*tail, token)
    return tail[max(0, len(tail) - count) :]


@dataclass(frozen=True, slots=True)
class AfterThinking:
    """The inner constraint starts after the marker. Until then all is allowed but the output's end."""

    inner: Constraint
    marker: Run

    def start(self, vocab_size: int, end_tokens: Collection[int]) -> Matcher:
        return _AfterThinking(
            self.inner.start(vocab_size, end_tokens),
            self.marker,
            all_but(end_tokens, vocab_size) if end_tokens else None,
        )


class _AfterThinking:
    def __init__(self, inner: Matcher, marker: Run, thinking: bytes | None) -> None:
        self._inner = inner
        self._marker = marker
        self._thinking = thinking  # the mask until then
        self._tail: Run = ()
        self._over = not marker

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        if self._over:
            return self._inner.masks(drafts)
        found, tail = [self._thinking], self._tail
        for i, draft in enumerate(drafts):
            tail = _last(tail, draft, len(self._marker))
            if tail == self._marker:
                return found + self._after_marker(drafts[i + 1 :])
            found.append(self._thinking)
        return found

    def _after_marker(self, drafts: Sequence[int]) -> list[bytes | None]:
        try:
            return self._inner.masks(drafts)
        except ConstraintFault:  # it will be raised again where the marker is no draft
            return []

    def advance(self, tokens: Sequence[int]) -> None:
        if self._over:
            self._inner.advance(tokens)
            return
        for i, token in enumerate(tokens):
            self._tail = _last(self._tail, token, len(self._marker))
            if self._tail == self._marker:
                self._over = True
                self._inner.advance(tokens[i + 1 :])
                return


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After ``budget`` tokens of thinking without a marker, the closing run follows; it ends with the marker."""

    budget: int
    closing: Run
    marker: Run = ()  # (): the closing run

    def start(self, vocab_size: int, end_tokens: Collection[int]) -> Matcher:
        marker = self.marker or self.closing
        assert marker, "thinking needs something that ends it"
        assert self.closing[-len(marker) :] == marker, "the closing run has to end with the marker"
        forced = tuple(only([token], vocab_size) for token in self.closing)
        return StateMatcher(_Thinking(marker, self.closing, forced, self.budget))


@dataclass(frozen=True, slots=True)
class _Thinking:
    marker: Run
    closing: Run
    forced: tuple[bytes, ...]  # a mask for each token of the closing run
    left: int  # tokens until the closing run
    tail: Run = ()
    num_closed: int = 0  # of the closing run
    over: bool = False

    def mask(self) -> bytes | None:
        return None if self.over or self.left else self.forced[self.num_closed]

    def after(self, token: int) -> _Thinking:
        if self.over:
            return self
        if not self.left:
            closed = self.num_closed + (token == self.closing[self.num_closed])
            return replace(self, num_closed=closed, over=closed == len(self.closing))
        tail = _last(self.tail, token, len(self.marker))
        return replace(self, left=self.left - 1, tail=tail, over=tail == self.marker)
