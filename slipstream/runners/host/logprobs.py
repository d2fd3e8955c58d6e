"""Which log-probabilities a host-driven step reports, and where they are computed."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runners.host.rows import Row, SamplingRows
from slipstream.runners.logprobs import StepLogprobs
from slipstream.runners.rows import RowSpan


def step_logprobs(rows: Sequence[Row], spans: Sequence[RowSpan], sampling: SamplingRows) -> StepLogprobs:
    tops = [num_top for row in rows if (num_top := row.logprobs.num_top) is not None]
    step = StepLogprobs({}, {}, [], max(tops, default=0))
    if not tops:
        return step
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        if count := row.num_prompt_logprobs(span):
            step.prompt[i] = count
    at = 0
    for i, span in zip(sampling.index, sampling.spans, strict=True):
        count = span.num_drafts + 1
        if rows[i].logprobs.logprobs is not None:
            step.samples[i] = count
            step.sample_index.extend(range(at, at + count))
        at += count
    return step


def prompt_index(step: StepLogprobs, spans: Sequence[RowSpan]) -> list[int]:
    """Flat indices of the tokens before those of the prompts that get a log-probability."""
    return [spans[i].offset + j for i, count in step.prompt.items() for j in range(count)]


def prompt_tokens(step: StepLogprobs, rows: Sequence[Row], spans: Sequence[RowSpan]) -> list[int]:
    """The tokens after them."""
    return [
        token
        for i, count in step.prompt.items()
        for token in rows[i].tokens[spans[i].start + 1 : spans[i].start + 1 + count]
    ]
