"""Constraints without any model: masks assume the drafts before them, matchers move by committed tokens only."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConstraintFault
from slipstream.sampling import AfterThinking, AllOf, Matcher, SamplingParams, ThinkingBudget, matcher_for
from slipstream.sampling.constraints import BadWords, Constraint
from slipstream.sampling.masks import all_but, allows, both, is_empty, only

VOCAB = 11  # no multiple of 8: the last byte has bits to spare
ENDS = (9, 10)

tokens = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6).map(tuple)
leaves = st.one_of(
    st.builds(BadWords, words),
    st.builds(ThinkingBudget, st.integers(0, 5), st.just((3, 4)), st.sampled_from([(), (4,)])),
    st.builds(AfterThinking, st.builds(BadWords, words), st.sampled_from([(4,), (3, 4), (3, 3)])),
)
constraints = st.one_of(leaves, st.lists(leaves, min_size=2, max_size=3).map(lambda parts: AllOf(tuple(parts))))


def allowed(mask: bytes | None) -> list[int]:
    return [token for token in range(VOCAB) if allows(mask, token)]


def params(constraint: Constraint | None, min_tokens: int = 0, bad: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
    return SamplingParams(constraint=constraint, min_tokens=min_tokens, bad_words=bad)


def first_mask(matcher: Matcher) -> list[int] | None:
    """What may come next; None: the matcher has come to an end."""
    try:
        return allowed(matcher.masks([])[0])
    except ConstraintFault:
        return None


@given(constraints, st.integers(0, 6), st.lists(st.tuples(st.lists(tokens, max_size=4), tokens), max_size=8))
def test_masks_after_drafts_are_those_of_a_matcher_that_went_there(
    constraint: Constraint, min_tokens: int, steps: list[tuple[list[int], int]]
) -> None:
    asked = params(constraint, min_tokens)
    matcher = matcher_for(asked, ENDS, VOCAB)
    assert matcher is not None
    output: list[int] = []
    for drafts, choice in steps:
        now = first_mask(matcher)
        if now is None:
            with pytest.raises(ConstraintFault):
                matcher.masks(drafts)
            return
        found = matcher.masks(drafts)
        for i, mask in enumerate(found):
            there = matcher_for(asked, ENDS, VOCAB)
            assert there is not None
            there.advance([*output, *drafts[:i]])
            assert allowed(mask) == first_mask(there)
            if i < len(drafts) and not allows(mask, drafts[i]):
                break  # tokens after it do not matter
        else:
            # Cut short only where nobody could go on.
            if len(found) <= len(drafts):
                there = matcher_for(asked, ENDS, VOCAB)
                assert there is not None
                there.advance([*output, *drafts[: len(found)]])
                assert first_mask(there) is None
        assert first_mask(matcher) == now, "asking has moved it"
        token = now[choice % len(now)]
        matcher.advance([token])
        output.append(token)


@given(words, st.lists(tokens, max_size=12))
def test_bad_words_are_never_completed(bad: tuple[tuple[int, ...], ...], output: list[int]) -> None:
    matcher = BadWords(bad).start(VOCAB, ())
    matcher.advance(output)
    would_complete = {t for t in range(VOCAB) if any([*output, t][-len(word) :] == list(word) for word in bad)}
    assert set(allowed(matcher.masks([])[0])) == set(range(VOCAB)) - would_complete


def test_no_end_before_min_tokens_unless_nothing_else_is_left() -> None:
    matcher = matcher_for(params(None, min_tokens=3), ENDS, VOCAB)
    assert matcher is not None
    assert [9 in allowed(mask) for mask in matcher.masks([1, 2, 3])] == [False, False, False, True]
    matcher.advance([1, 1, 1])
    assert matcher.masks([5]) == [None, None]
    only_ends = matcher_for(params(None, 3, bad=tuple((t,) for t in range(9))), ENDS, VOCAB)
    assert only_ends is not None
    assert allowed(only_ends.masks([])[0]) == [9, 10]


def test_a_request_that_asks_for_nothing_has_no_matcher() -> None:
    assert matcher_for(SamplingParams(), ENDS, VOCAB) is None
    assert matcher_for(SamplingParams(min_tokens=5), (), VOCAB) is None


def test_constraints_that_leave_nothing_are_a_fault() -> None:
    everything = BadWords(tuple((t,) for t in range(VOCAB - 1)))
    matcher = AllOf((everything, BadWords(((VOCAB - 1,),)))).start(VOCAB, ())
    with pytest.raises(ConstraintFault, match="no token"):
        matcher.masks([1])


class Fixed:
    """Allows one run of tokens, then only ends: a grammar in small."""

    def __init__(self, run: Sequence[int]) -> None:
        self._run = tuple(run)

    def start(self, vocab_size: int, end_tokens: Sequence[int]) -> Fixed.Matcher:
        return Fixed.Matcher(self._run, vocab_size, tuple(end_tokens))

    class Matcher:
        def __init__(self, run: tuple[int, ...], vocab_size: int, ends: tuple[int, ...]) -> None:
            self.run, self.vocab_size, self.ends = run, vocab_size, ends

        def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
            rest = [*self.run, None, *[None] * len(drafts)][: len(drafts) + 1]
            return [only(self.ends if token is None else [token], self.vocab_size) for token in rest]

        def advance(self, tokens: Sequence[int]) -> None:
            self.run = self.run[len(tokens) :]


def generate(constraint: Constraint, wish: Sequence[int], length: int) -> list[int]:
    """An output that follows the wishes where it may."""
    matcher = constraint.start(VOCAB, ENDS)
    chance, output = random.Random(0), []
    for i in range(length):
        [mask] = matcher.masks([])
        token = wish[i] if i < len(wish) and allows(mask, wish[i]) else chance.choice(allowed(mask))
        matcher.advance([token])
        output.append(token)
        if token in ENDS:
            break
    return output


def test_grammar_starts_after_thinking_and_thinking_cannot_end_the_output() -> None:
    constraint = AfterThinking(Fixed([5, 6]), (3, 4))
    assert generate(constraint, [1, 3, 2, 3, 4, 0, 0], 8)[:7] == [1, 3, 2, 3, 4, 5, 6]
    matcher = constraint.start(VOCAB, ENDS)
    assert allowed(matcher.masks([])[0]) == list(range(9))
    # The marker in the middle of the drafts.
    found = matcher.masks([1, 3, 4, 5, 7])
    assert [allowed(mask) for mask in found[3:]] == [[5], [6], list(ENDS)]


def test_a_budget_ends_thinking_with_the_closing_run() -> None:
    both_of_them = AllOf((ThinkingBudget(3, (2, 3, 4), (4,)), AfterThinking(Fixed([5]), (4,))))
    assert generate(both_of_them, [0] * 9, 9)[:7] == [0, 0, 0, 2, 3, 4, 5]
    assert generate(both_of_them, [0, 4, 0], 9)[:3] == [0, 4, 5], "it ended by itself in time"
    assert generate(ThinkingBudget(0, (4,)), [0] * 3, 3) == [4, 0, 0]


@given(st.sets(tokens), st.sets(tokens))
def test_masks(one: set[int], other: set[int]) -> None:
    assert set(allowed(only(one, VOCAB))) == one
    assert set(allowed(all_but(one, VOCAB))) == set(range(VOCAB)) - one
    assert set(allowed(both(only(one, VOCAB), only(other, VOCAB)))) == one & other
    assert is_empty(only(one, VOCAB)) == (not one)
