"""Which log-probabilities a step tells, counted by row, and the host's side of telling them.

A row that asked for them is told of its prompt's tokens as they are read, and of its draws. Knows no array library: a
runner hands over plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from slipstream.engine.contract import RowResult, TokenLogprobs
from slipstream.runners.host.rows import Row
from slipstream.runners.rows import Asked, RowSpan

PIECE = 1 << 23  # logits that are looked at together: prompts are long and vocabularies large

Numbers = Sequence[float]  # of one token: its log-probability, the ids of the likeliest, theirs


@dataclass(frozen=True, slots=True)
class Telling:
    """What a step tells. By the row's index in the plan, in the order in which the numbers lie."""

    prompt: dict[int, int]  # tokens of the prompt, each behind a fed one
    draws: dict[int, int]  # draws of which some may turn out not to count
    places: list[int]  # of those draws, among all positions that the runner draws at
    num_top: int  # the most that any of these rows asked for

    def __bool__(self) -> bool:
        return bool(self.prompt or self.draws)

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt.values()) + sum(self.draws.values())

    def prompt_places(self, firsts: Sequence[int]) -> list[int]:
        """Of the tokens before those of the prompt, given where each row's first fed token lies."""
        return [firsts[i] + j for i, count in self.prompt.items() for j in range(count)]

    def prompt_tokens(self, rows: Sequence[Row], spans: Sequence[RowSpan]) -> list[int]:
        """The tokens behind them."""
        return [
            token
            for i, count in self.prompt.items()
            for token in rows[i].tokens[spans[i].start + 1 : spans[i].start + 1 + count]
        ]


def find_telling(rows: Sequence[Row], spans: Sequence[RowSpan], drawing: Sequence[int]) -> Telling:
    """``drawing``: the rows that draw, in the order of their positions."""
    tops = [most for row in rows if (most := row.asked.most) is not None]
    telling = Telling({}, {}, [], max(tops, default=0))
    if not tops:
        return telling
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        if count := row.num_prompt_logprobs(span):
            telling.prompt[i] = count
    at = 0
    for i in drawing:
        count = spans[i].num_drafts + 1
        if rows[i].asked.logprobs is not None:
            telling.draws[i] = count
            telling.places.extend(range(at, at + count))
        at += count
    return telling


def with_logprobs(
    results: tuple[RowResult, ...], asked: Sequence[Asked], telling: Telling, numbers: Sequence[Numbers]
) -> tuple[RowResult, ...]:
    """The results of a step, with what it tells: all of the prompts first, then the draws."""
    told, source = list(results), iter(numbers)
    for i, count in telling.prompt.items():
        num_top = asked[i].prompt_logprobs or 0
        told[i] = replace(told[i], prompt_logprobs=_read_all(islice(source, count), num_top))
    for i, count in telling.draws.items():
        kept = list(islice(source, count))[: len(told[i].tokens)]
        told[i] = replace(told[i], logprobs=_read_all(kept, asked[i].logprobs or 0))
    return tuple(told)


def _read_all(numbers: Iterable[Numbers], num_top: int) -> tuple[TokenLogprobs, ...]:
    return tuple(read_logprobs(one, num_top) for one in numbers)


def read_logprobs(numbers: Numbers, num_top: int) -> TokenLogprobs:
    width = len(numbers) // 2
    tokens, chances = numbers[1 : 1 + width], numbers[1 + width :]
    return TokenLogprobs(numbers[0], tuple((int(token), x) for token, x in zip(tokens[:num_top], chances)))
