"""Which log-probabilities a step reports, where only the device knows how many samples of a row will count."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.logprobs import Telling
from slipstream.runners.rows import Asked
from slipstream.sampling.params import MAX_TOP_LOGPROBS


def requested_logprobs(feeds: Sequence[RowFeed], asked: Sequence[Asked]) -> tuple[Telling, list[int]]:
    """The step's request, and the flat index of the token before each: prompts first, then samples.

    All samples of a row are reported, and cut to those that count when they are read.
    """
    request = Telling({}, {}, [], MAX_TOP_LOGPROBS)
    prompt_index: list[int] = []
    offset = 0
    for i, (row, wanted) in enumerate(zip(feeds, asked, strict=True)):
        if wanted.prompt_logprobs is not None and row.num_before:
            request.prompt[i] = row.num_before
            prompt_index += range(offset, offset + row.num_before)
        if wanted.logprobs is not None and row.num_samples:
            request.draws[i] = row.num_samples
            request.places.extend(range(offset + row.num_before, offset + row.feed))
        offset += row.feed
    return request, [*prompt_index, *request.places]
