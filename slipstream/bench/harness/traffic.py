"""Streams on an engine, with the time of every event: what the benchmarks of traffic measure from.

Times are taken in the engine thread, where a step's tokens are handed out; nothing is decoded to text.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.engine.engine import Engine
from slipstream.engine.request import PromptCache, TokenEvent
from slipstream.engine.stats import RequestStats
from slipstream.errors import EngineDead
from slipstream.sampling import SamplingParams

NO_CACHE = PromptCache(enabled=False)  # prompts that come again are read again


@dataclass(frozen=True, slots=True)
class StreamRequest:
    prompt: Sequence[int]
    params: SamplingParams
    cache: PromptCache = NO_CACHE


class TokenTimes:
    """When one stream's tokens came, ours or a peer's."""

    def __init__(self, submitted: float, times: list[float], counts: list[int]) -> None:
        self.submitted = submitted
        self.times = times  # of each event that brought tokens
        self.counts = counts  # of the tokens it brought

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def end(self) -> float:
        return self.times[-1]

    @property
    def first_seconds(self) -> float:
        return self.first - self.submitted

    def gaps(self, after: float = 0.0, until: float = float("inf")) -> list[float]:
        """Seconds between two events, one per step however many tokens it brought; those that end in the window."""
        return [late - early for early, late in pairwise(self.times) if after < late <= until]

    def tokens_within(self, after: float, until: float) -> int:
        return sum(count for at, count in zip(self.times, self.counts, strict=True) if after < at <= until)


def decode_rate(streams: Sequence[TokenTimes]) -> float | None:
    """Tokens a second of all streams together once each had its first token; None if that is no time."""
    began, ended = max(each.first for each in streams), max(each.end for each in streams)
    tokens = sum(each.tokens_within(began, ended) for each in streams)
    return round(tokens / (ended - began), 2) if tokens and ended > began else None


class StreamLog(TokenTimes):
    """A sink: what one stream was given, and when."""

    def __init__(self, num_prompt: int) -> None:
        super().__init__(time.perf_counter(), [], [])
        self.num_prompt = num_prompt
        self.tokens: list[int] = []
        self.request_id = ""
        self._last: TokenEvent | None = None
        self._begun = threading.Event()
        self._done = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        if event.tokens:
            self.times.append(time.perf_counter())
            self.counts.append(len(event.tokens))
            self.tokens += event.tokens
            if len(self.times) == 1:
                self._begun.set()
        if event.finish_reason is not None:
            self._last = event
            self._begun.set()
            self._done.set()

    def wait_begun(self) -> None:
        self._begun.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended."""
        ended = self._done.wait(timeout)
        if self._last is not None and self._last.finish_reason == "error":
            raise EngineDead(self._last.error)
        return ended

    @property
    def finished(self) -> bool:
        """All its tokens came."""
        return self._last is not None and self._last.finish_reason in ("length", "stop")

    @property
    def stats(self) -> RequestStats:
        assert self._last is not None
        assert self._last.stats is not None
        return self._last.stats


def submit(engine: Engine, request: StreamRequest) -> StreamLog:
    log = StreamLog(len(request.prompt))
    [log.request_id] = engine.submit_many(request.prompt, request.params, [log], cache=request.cache)
    return log


def run_together(engine: Engine, requests: Sequence[StreamRequest]) -> list[StreamLog]:
    """All submitted at once; returns when the last has ended."""
    logs: list[StreamLog] = []
    try:
        logs += (submit(engine, request) for request in requests)
        for log in logs:
            log.wait()
    finally:
        abort(engine, logs)  # what is finished ignores it: this is for a refused prompt, or Ctrl-C
    return logs


def abort(engine: Engine, logs: Sequence[StreamLog]) -> None:
    for log in logs:
        engine.abort(log.request_id)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of them do not exceed."""
    assert values
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def percentiles_ms(values: Sequence[float], percents: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Of seconds, in milliseconds; empty for no values."""
    return {f"p{p}": round(1e3 * percentile(values, p), 3) for p in percents} if values else {}
