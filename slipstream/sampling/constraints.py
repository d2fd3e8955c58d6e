"""Constraints on the output, as masks over the vocabulary.

A Constraint is made once and shared; a Matcher walks one stream's output through it. Runners ask a matcher for the
masks of a row's positions, assuming the drafts before each, and move it by committed tokens only. ``matcher_for``
joins all constraints of a request: a new one is a class and its line there. Knows no array library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.errors import ConstraintFault
from slipstream.sampling.masks import all_but, allows, both, is_empty


class Matcher(Protocol):
    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """The masks of the next position and of those after each draft, as far as the drafts are legal.

        At least one mask (see masks.py), at most ``len(drafts) + 1``; None allows all. A draft without a mask after it
        may not be accepted. Does not move the matcher. Raises ConstraintFault where not even the next position has
        a mask: the row then ends with that error.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """These were committed. Tokens after an end token do not matter."""


class Constraint(Protocol):
    def start(self, vocab_size: int, end_tokens: Collection[int]) -> Matcher:
        """A matcher before the first token of an output that ``end_tokens`` end."""
        ...


class State(Protocol):
    """A position in the output with the mask of the next token; it never changes."""

    def mask(self) -> bytes | None: ...

    def after(self, token: int) -> State: ...


class StateMatcher:
    """A matcher over states that cost next to nothing."""

    def __init__(self, state: State) -> None:
        self._state = state

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        state = self._state
        found = [state.mask()]
        for draft in drafts:
            state = state.after(draft)
            found.append(state.mask())
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._state = self._state.after(token)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several constraints at once. Where together they allow no token, the stream ends with a fault."""

    parts: tuple[Constraint, ...]

    def start(self, vocab_size: int, end_tokens: Collection[int]) -> Matcher:
        matchers = [part.start(vocab_size, end_tokens) for part in self.parts]
        return matchers[0] if len(matchers) == 1 else _AllOf(matchers)


class _AllOf:
    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for column in zip(*(matcher.masks(drafts) for matcher in self._matchers), strict=False):
            mask: bytes | None = None
            for part in column:
                mask = both(mask, part)
            if is_empty(mask):
                break
            found.append(mask)
            if len(found) <= len(drafts) and not allows(mask, drafts[len(found) - 1]):
                break
        if not found:
            raise ConstraintFault("the constraints of this request leave no token to go on with")
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        for matcher in self._matchers:
            matcher.advance(tokens)


@dataclass(frozen=True, slots=True)
class BadWords:
    """Runs of tokens that the output never completes."""

    words: tuple[tuple[int, ...], ...]

    def start(self, vocab_size: int, end_tokens: Collection[int]) -> Matcher:
        lasts: dict[tuple[int, ...], set[int]] = {}  # by the tokens before them
        for *before, last in self.words:
            lasts.setdefault(tuple(before), set()).add(last)
        return StateMatcher(_Words(lasts, tuple(sorted({len(before) for before in lasts})), vocab_size))


@dataclass(frozen=True, slots=True)
class _Words:
    lasts: Mapping[tuple[int, ...], set[int]]
    lengths: tuple[int, ...]  # of the keys
    vocab_size: int
    tail: tuple[int, ...] = ()  # the output's last tokens, as many as the longest key has

    def mask(self) -> bytes | None:
        tails = (self.tail[len(self.tail) - length :] for length in self.lengths if length <= len(self.tail))
        bad = {last for tail in tails for last in self.lasts.get(tail, ())}
        return all_but(bad, self.vocab_size) if bad else None

    def after(self, token: int) -> _Words:
        tail = (*self.tail, token)
        return replace(self, tail=tail[max(0, len(tail) - self.lengths[-1]) :])


class MinTokens:
    """No end token among the first ones, unless no other token is left (a grammar whose text is complete)."""

    def __init__(self, inner: Matcher | None, count: int, not_end: bytes) -> None:
        self._inner = inner
        self._left = count
        self._not_end = not_end  # all but the end tokens

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        found = [None] * (len(drafts) + 1) if self._inner is None else self._inner.masks(drafts)
        return [self._without_end(mask) if i < self._left else mask for i, mask in enumerate(found)]

    def _without_end(self, mask: bytes | None) -> bytes | None:
        rest = both(mask, self._not_end)
        return mask if is_empty(rest) else rest

    def advance(self, tokens: Sequence[int]) -> None:
        self._left = max(0, self._left - len(tokens))
        if self._inner is not None:
            self._inner.advance(tokens)
