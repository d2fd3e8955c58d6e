"""The log-probabilities that a step reports, counted by row, and the host's side of reading them.

A row that asked for them gets those of its prompt's tokens as they are read, and those of its samples. Knows no array
library: a runner hands over plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from slipstream.engine.contract import RowJoin, RowResult, TokenLogprobs

PIECE = 1 << 23  # logits that are computed together: prompts are long and vocabularies large

Numbers = Sequence[float]  # of one token: its log-probability, the ids of the likeliest, theirs


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """How many of the likeliest tokens a row wants besides each token's own log-probability; None: nothing at all."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_top(self) -> int | None:
        return max((top for top in (self.logprobs, self.prompt_logprobs) if top is not None), default=None)


NO_LOGPROBS = LogprobRequest()


def logprobs_of(join: RowJoin) -> LogprobRequest:
    """A stream that joins with output has had its prompt's log-probabilities before."""
    fresh = join.num_prompt == len(join.tokens)
    return LogprobRequest(join.params.logprobs, join.params.prompt_logprobs if fresh else None)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log-probabilities of a step. By the row's index in the plan, in the order in which the numbers lie."""

    prompt: dict[int, int]  # tokens of the prompt, each after a fed one
    samples: dict[int, int]  # samples, of which some may turn out not to count
    sample_index: list[int]  # of those samples, among all positions at which the runner samples
    num_top: int  # the maximum that any of these rows asked for

    def __bool__(self) -> bool:
        return bool(self.prompt or self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt.values()) + sum(self.samples.values())


def with_logprobs(
    results: tuple[RowResult, ...],
    requests: Sequence[LogprobRequest],
    step: StepLogprobs,
    numbers: Sequence[Numbers],
) -> tuple[RowResult, ...]:
    """The results of a step with its log-probabilities. ``numbers``: all of the prompts first, then the samples."""
    complete, source = list(results), iter(numbers)
    for i, count in step.prompt.items():
        num_top = requests[i].prompt_logprobs or 0
        complete[i] = replace(complete[i], prompt_logprobs=_read_all(islice(source, count), num_top))
    for i, count in step.samples.items():
        kept = list(islice(source, count))[: len(complete[i].tokens)]
        complete[i] = replace(complete[i], logprobs=_read_all(kept, requests[i].logprobs or 0))
    return tuple(complete)


def _read_all(numbers: Iterable[Numbers], num_top: int) -> tuple[TokenLogprobs, ...]:
    return tuple(read_logprobs(one, num_top) for one in numbers)


def read_logprobs(numbers: Numbers, num_top: int) -> TokenLogprobs:
    width = len(numbers) // 2
    tokens, logprobs = numbers[1 : 1 + width], numbers[1 + width :]
    return TokenLogprobs(numbers[0], tuple((int(token), x) for token, x in zip(tokens[:num_top], logprobs)))
