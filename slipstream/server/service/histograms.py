"""Histograms of requests for `/metrics`, under vLLM's names. Observed on the event loop, as events arrive."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.engine.request import TokenEvent
from slipstream.engine.stats import RequestStats
from slipstream.server.service.status import StatusMonitor

Labels = Mapping[str, str]
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """For one thread only, so without the library's lock: it is called for every token event."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Labels, name: str | None = None) -> Metric:
        """``name``: another one for the same numbers."""
        return histogram_family(name or self._name, self._text, self._bounds, self._counts, self._sum, labels)


def histogram_family(
    name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float, labels: Labels
) -> Metric:
    edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
    buckets = list(zip(edges, map(float, accumulate(counts)), strict=True))
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, total)
    return family


class RequestHistograms(Collector):
    def __init__(self, monitor: StatusMonitor) -> None:
        self._monitor = monitor
        self._all: list[Histogram] = []
        self.first_token = self._add("time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN)
        self.between = self._add(
            "inter_token_latency_seconds", "Between two tokens; those of one step share its time", BETWEEN
        )
        self.mean_between = self._add(
            "request_time_per_output_token_seconds", "Mean time a token of a request, after its first", BETWEEN
        )
        self.whole = self._add("e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self.queue = self._add("request_queue_time_seconds", "In the engine's queue", SECONDS)
        self.prefill = self._add("request_prefill_time_seconds", "From the first step to the first token", SECONDS)
        self.decode = self._add("request_decode_time_seconds", "From the first token to the last", SECONDS)
        self.inference = self._add("request_inference_time_seconds", "From the first step to the last token", SECONDS)
        self.prompt = self._add("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.generated = self._add("request_generation_tokens", "Tokens generated for one choice", TOKENS)
        self.most_generated = self._add(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice", TOKENS
        )
        self.num_choices = self._add("request_params_n", "Choices that a request asks for", CHOICES)
        self.max_tokens = self._add("request_params_max_tokens", "max_tokens of requests that give it", TOKENS)

    def _add(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        self._all.append(Histogram(f"vllm:{name}", text, bounds))
        return self._all[-1]

    def collect(self) -> Iterable[Metric]:
        labels = self._monitor.labels
        if labels is None:
            return
        for histogram in self._all:
            yield histogram.family(labels)
        yield self.between.family(labels, "vllm:time_per_output_token_seconds")  # its name in older dashboards

    def describe(self) -> Iterable[Metric]:
        return ()

    def observe_finished(self, stats: RequestStats, seconds: float) -> None:
        """A choice has ended, ``seconds`` after its request arrived."""
        self.whole.observe(seconds)
        self.prompt.observe(stats.prompt_tokens)
        self.generated.observe(stats.output_tokens)
        queued = stats.total_seconds if stats.queue_seconds is None else stats.queue_seconds
        first = stats.total_seconds if stats.first_token_seconds is None else stats.first_token_seconds
        decoding = stats.total_seconds - first
        self.queue.observe(queued)
        self.prefill.observe(first - queued)
        self.decode.observe(decoding)
        self.inference.observe(stats.total_seconds - queued)
        if stats.output_tokens > 1:
            self.mean_between.observe(decoding / (stats.output_tokens - 1))


class RequestLatencies:
    """Of one request: its choices are observed each, the request itself when the last of them has ended."""

    def __init__(self, histograms: RequestHistograms, num_choices: int, max_tokens: int | None) -> None:
        self.choices = [Latencies(histograms, self) for _ in range(num_choices)]
        self._histograms, self._max_tokens = histograms, max_tokens
        self._num_open, self._most_generated = num_choices, 0

    def ended(self, num_generated: int) -> None:
        self._most_generated = max(self._most_generated, num_generated)
        self._num_open -= 1
        if self._num_open:
            return
        self._histograms.num_choices.observe(len(self.choices))
        self._histograms.most_generated.observe(self._most_generated)
        if self._max_tokens is not None:
            self._histograms.max_tokens.observe(self._max_tokens)


class Latencies:
    """Of one choice, by the engine's timestamps: a slow reader does not change them."""

    def __init__(self, histograms: RequestHistograms, request: RequestLatencies) -> None:
        self._histograms, self._request = histograms, request
        self._arrival = self._last = time.monotonic()
        self._seen_first = False

    def observe(self, event: TokenEvent) -> None:
        if event.tokens:
            self._observe_tokens(event.at, len(event.tokens))
        if event.stats is not None:
            self._histograms.observe_finished(event.stats, event.at - self._arrival)
            self._request.ended(event.stats.output_tokens)

    def _observe_tokens(self, at: float, count: int) -> None:
        gap, self._last = at - self._last, at
        if not self._seen_first:
            self._seen_first = True
            self._histograms.first_token.observe(gap)
            return
        self._histograms.between.observe(gap / count, count)
