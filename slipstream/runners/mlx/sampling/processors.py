"""Logits processors: each a small object with one method, applied at one position with exactly that position's history.

Same order and meaning as on every runner. To add one: write the class, name it in ``processors_for``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    tokens: mx.array  # int32 [n]: prompt, output and the drafts before this position, each once
    num_prompt: int

    @property
    def output(self) -> mx.array:
        return self.tokens[self.num_prompt :]


class Processor(Protocol):
    def __call__(self, logits: mx.array, history: History) -> mx.array:
        """One position's logits [vocab], changed."""
        ...


def _counts(tokens: mx.array, vocab_size: int) -> mx.array:
    """How often each token occurs. float32 [vocab]"""
    counts = mx.zeros(vocab_size)
    return counts.at[tokens].add(1.0) if tokens.size else counts


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    factor: float

    def __call__(self, logits: mx.array, history: History) -> mx.array:
        seen = _counts(history.tokens, logits.shape[0]) > 0
        return mx.where(seen, mx.where(logits > 0, logits / self.factor, logits * self.factor), logits)


@dataclass(frozen=True, slots=True)
class CountPenalty:
    presence: float
    frequency: float

    def __call__(self, logits: mx.array, history: History) -> mx.array:
        counts = _counts(history.output, logits.shape[0])
        return logits - (counts * self.frequency + (counts > 0) * self.presence)


@dataclass(frozen=True, slots=True)
class LogitBias:
    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, logits: mx.array, history: History) -> mx.array:
        return logits.at[mx.array(self.tokens)].add(mx.array(self.values))


@dataclass(frozen=True, slots=True)
class Truncation:
    """top_k, then top_p, then min_p, on the distribution at the row's temperature."""

    inv_temperature: float
    top_k: int
    top_p: float
    min_p: float

    def __call__(self, logits: mx.array, history: History) -> mx.array:
        order = mx.argsort(-logits)
        ranked = logits[order]
        rank = mx.arange(logits.shape[0])
        if 0 < self.top_k < logits.shape[0]:
            ranked = mx.where(rank < self.top_k, ranked, -mx.inf)
        chance = mx.softmax(ranked * self.inv_temperature)
        drop = chance < self.min_p * chance[0]
        if self.top_p < 1.0:
            drop = drop | (mx.cumsum(chance) - chance >= self.top_p)
        kept = mx.where(drop & (rank > 0), -mx.inf, ranked)
        return mx.put_along_axis(logits, order, kept, axis=0)


def processors_for(params: SamplingParams) -> tuple[Processor, ...]:
    found: list[Processor] = []
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenalty(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(CountPenalty(params.presence_penalty, params.frequency_penalty))
    if params.logit_bias:
        found.append(LogitBias(tuple(params.logit_bias.keys()), tuple(params.logit_bias.values())))
    return tuple(found)


def truncation_for(params: SamplingParams) -> tuple[Processor, ...]:
    """What is applied after the masks."""
    if not params.truncates:
        return ()
    return (Truncation(params.inverse_temperature, params.top_k, params.top_p, params.min_p),)
