"""Logits processors: each a small object with one method, applied at one position with exactly that position's history.

To add one: write the class, name it in ``processors_for``. A row that asks for nothing has none and pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    tokens: Tensor  # int64 [n]: prompt, output and the drafts before this position, each once
    num_prompt: int

    @property
    def output(self) -> Tensor:
        return self.tokens[self.num_prompt :]


class Processor(Protocol):
    def __call__(self, logits: Tensor, history: History) -> None:
        """Change one position's logits [vocab] in place."""


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    factor: float

    def __call__(self, logits: Tensor, history: History) -> None:
        scores = logits[history.tokens]
        # A token that occurs twice gets the same value twice: the penalty counts once.
        logits[history.tokens] = torch.where(scores > 0, scores / self.factor, scores * self.factor)


@dataclass(frozen=True, slots=True)
class CountPenalty:
    presence: float
    frequency: float

    def __call__(self, logits: Tensor, history: History) -> None:
        counts = torch.zeros_like(logits).index_add_(
            0, history.output, torch.ones_like(history.output, dtype=logits.dtype)
        )
        logits -= counts * self.frequency + (counts > 0) * self.presence


@dataclass(frozen=True, slots=True)
class LogitBias:
    tokens: Tensor  # int64 [n]
    values: Tensor  # [n]

    def __call__(self, logits: Tensor, history: History) -> None:
        logits[self.tokens] += self.values.to(logits.dtype)


@dataclass(frozen=True, slots=True)
class Truncation:
    """top_k, then top_p, then min_p, on the distribution at the row's temperature."""

    inv_temperature: float
    top_k: int
    top_p: float
    min_p: float

    def __call__(self, logits: Tensor, history: History) -> None:
        ranked, order = logits.sort(descending=True, stable=True)
        if 0 < self.top_k < logits.shape[0]:
            ranked[self.top_k :] = float("-inf")
        chance = (ranked * self.inv_temperature).softmax(-1)
        drop = chance < self.min_p * chance[0]
        if self.top_p < 1.0:
            drop |= chance.cumsum(-1) - chance >= self.top_p
        drop[:1].fill_(False)  # an assignment would make the host wait for a GPU
        logits[order] = ranked.masked_fill(drop, float("-inf"))


def processors_for(params: SamplingParams, device: torch.device) -> tuple[Processor, ...]:
    found: list[Processor] = []
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenalty(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(CountPenalty(params.presence_penalty, params.frequency_penalty))
    if params.logit_bias:
        tokens, values = (list(part) for part in (params.logit_bias.keys(), params.logit_bias.values()))
        found.append(LogitBias(torch.tensor(tokens, device=device), torch.tensor(values, device=device)))
    return tuple(found)


def truncation_for(params: SamplingParams) -> tuple[Processor, ...]:
    """What is applied after the masks."""
    if not params.truncates:
        return ()
    return (Truncation(params.inverse_temperature, params.top_k, params.top_p, params.min_p),)
