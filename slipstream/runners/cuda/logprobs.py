"""Which log-probabilities a step reports, where only the device knows how many samples of a row will count."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.logprobs import LogprobRequest, StepLogprobs
from slipstream.sampling.params import MAX_TOP_LOGPROBS


def requested_logprobs(feeds: Sequence[RowFeed], requests: Sequence[LogprobRequest]) -> tuple[StepLogprobs, list[int]]:
    """The step's log-probabilities, and the flat index of the token before each: prompts first, then samples.

    All samples of a row are reported, and cut to those that count when they are read.
    """
    step = StepLogprobs({}, {}, [], MAX_TOP_LOGPROBS)
    prompt_index: list[int] = []
    offset = 0
    for i, (row, wanted) in enumerate(zip(feeds, requests, strict=True)):
        if wanted.prompt_logprobs is not None and row.num_before:
            step.prompt[i] = row.num_before
            prompt_index += range(offset, offset + row.num_before)
        if wanted.logprobs is not None and row.num_samples:
            step.samples[i] = row.num_samples
            step.sample_index.extend(range(offset + row.num_before, offset + row.feed))
        offset += row.feed
    return step, [*prompt_index, *step.sample_index]
