"""Constraints on llguidance: a compiled grammar, and a matcher for each stream."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import llguidance

from slipstream.errors import ConstraintFault
from slipstream.sampling.masks import is_empty, num_bytes, only

# The engine's time for the masks of a stream: hundreds of times the usual, so that only a grammar made to be slow runs
# out of it. It grows with the output.
FIRST_SECONDS = 0.4
TOKEN_SECONDS = 0.002


@dataclass(frozen=True, eq=False)
class Grammar:
    """Compiled once, for any number of streams."""

    prototype: llguidance.LLMatcher
    vocab_size: int  # the tokenizer's; the next token is the end of output
    eos_token_ids: tuple[int, ...]  # allowed after a complete text, where the stream has no end tokens of its own

    def start(self, vocab_size: int, end_tokens: Collection[int]) -> GrammarMatcher:
        return GrammarMatcher(self, vocab_size, frozenset(end_tokens) or frozenset(self.eos_token_ids))


class GrammarMatcher:
    """Drafts are consumed and rolled back again; masks are kept while they may be asked for again."""

    def __init__(self, grammar: Grammar, vocab_size: int, ends: frozenset[int]) -> None:
        self._inner = grammar.prototype.deep_copy()
        self._end_bit = grammar.vocab_size
        self._vocab_size = vocab_size
        self._ends = ends
        self._end_mask = only(ends, vocab_size)
        self._end_bits = int.from_bytes(self._end_mask, "little")
        self._masks: dict[tuple[int, ...], bytes] = {}  # by the drafts before
        self._over = False  # an end token was committed
        self._fault = ""
        self._seconds = FIRST_SECONDS

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        if self._fault:
            raise ConstraintFault(self._fault)
        if self._over:
            return [self._end_mask] * (len(drafts) + 1)
        found: list[bytes | None] = []
        try:
            self._follow(drafts, found)
        except ConstraintFault as fault:
            if not found:
                self._fault = str(fault)
                raise
        return found

    def _follow(self, drafts: Sequence[int], found: list[bytes | None]) -> None:
        num_taken = 0
        try:
            found.append(self._mask(()))
            for i, draft in enumerate(drafts):
                if draft in self._ends:
                    found += [self._end_mask] * (len(drafts) - i)  # tokens after the end do not matter
                    return
                if not self._inner.try_consume_tokens([draft]):
                    return
                num_taken += 1
                found.append(self._mask(tuple(drafts[: i + 1])))
        finally:
            self._inner.rollback(num_taken)

    def _mask(self, drafts: tuple[int, ...]) -> bytes:
        if drafts not in self._masks:
            began = time.thread_time()
            self._masks[drafts] = self._computed()
            self._seconds -= time.thread_time() - began
            if self._seconds < 0:
                raise ConstraintFault("the grammar is too complex: what may follow takes too long to compute")
        return self._masks[drafts]

    def _computed(self) -> bytes:
        bits = int.from_bytes(self._inner.compute_bitmask(), "little")
        if self._inner.is_error():
            raise ConstraintFault(f"the grammar cannot be followed any further: {_reason(self._inner.get_error())}")
        complete = bits >> self._end_bit & 1
        bits &= (1 << min(self._end_bit, self._vocab_size)) - 1
        if complete:
            bits |= self._end_bits
        mask = bits.to_bytes(num_bytes(self._vocab_size), "little")
        if is_empty(mask):
            raise ConstraintFault("the grammar allows nothing that this stream could go on with")
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        committed = tuple(tokens)
        self._masks = {
            drafts[len(committed) :]: mask
            for drafts, mask in self._masks.items()
            if drafts[: len(committed)] == committed
        }
        for token in tokens:
            if self._over or self._fault:
                return
            self._seconds += TOKEN_SECONDS
            if token in self._ends:
                self._over = True
            elif not self._inner.try_consume_tokens([token]):
                self._fault = f"the grammar does not allow token {token} here"


def _reason(message: str) -> str:
    return message.partition("\n")[0]
