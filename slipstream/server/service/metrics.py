"""`/metrics`: the engine's counters and the latencies of requests, in Prometheus' text format.

The speculative counters have vLLM's names, which dashboards and benchmark clients already read. The engine counts; this
file reads its snapshot when it is scraped. Latencies are observed as token events arrive.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.engine.request import TokenEvent
from slipstream.server.service.status import StatusMonitor

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    def __init__(self, monitor: StatusMonitor) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(monitor))
        self.http = Counter(
            "slipstream_http_requests", "HTTP responses by path and status", ["path", "status"], registry=self.registry
        )
        self.first_token = Histogram(
            "slipstream_time_to_first_token_seconds", "From a request's arrival to its first token", FIRST_TOKEN
        )
        self.between = Histogram(
            "slipstream_inter_token_seconds",
            "Between two tokens of a stream; the tokens of one step share its time",
            BETWEEN,
        )
        self.registry.register(self.first_token)
        self.registry.register(self.between)

    def latencies(self) -> Latencies:
        return Latencies(self)


class Histogram(Collector):
    """For one thread only, so without the library's lock: it is called for every token event."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        edges = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

    def describe(self) -> Iterable[Metric]:
        return ()


class Latencies:
    """The latencies of one choice by the engine's timestamps: a slow reader does not change them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last = time.monotonic()
        self._seen_first = False

    def observe(self, event: TokenEvent) -> None:
        if not event.tokens:
            return
        gap, self._last = event.at - self._last, event.at
        if not self._seen_first:
            self._seen_first = True
            self._metrics.first_token.observe(gap)
            return
        self._metrics.between.observe(gap / len(event.tokens), len(event.tokens))


class EngineCollector(Collector):
    def __init__(self, monitor: StatusMonitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterable[Metric]:
        yield from self._load()
        yield from self._work()
        yield from self._speculation()

    def describe(self) -> Iterable[Metric]:
        return ()

    def _load(self) -> Iterable[Metric]:
        seen, memory = self._monitor.snapshot(), self._monitor.memory()
        yield _gauge("slipstream_requests_running", "Streams that decode or read their prompt", seen.num_running)
        yield _gauge("slipstream_requests_waiting", "Requests in the queue", seen.num_waiting)
        yield _gauge("slipstream_kv_blocks_used", "KV blocks in use", memory["kv_blocks_used"])
        yield _gauge("slipstream_kv_blocks", "KV blocks in all", memory["kv_blocks_total"])
        yield _gauge("slipstream_kv_bytes", "Bytes of the KV pool", memory["kv_bytes"])
        yield _gauge("slipstream_state_bytes", "Bytes of recurrent states, all slots", memory["state_bytes"])
        slots = seen.num_running if memory["state_bytes"] else 0
        yield _gauge("slipstream_state_slots_used", "Slots whose recurrent state is in use", slots)
        yield _gauge("slipstream_resident_bytes", "Resident memory of the process", memory["rss_bytes"])
        yield _gauge("slipstream_ready", "1 while new work is taken", float(self._monitor.takes_work))

    def _work(self) -> Iterable[Metric]:
        seen = self._monitor.snapshot()
        finished = CounterMetricFamily("slipstream_requests", "Requests finished", labels=["reason"])
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], seen.finished.get(reason, 0))
        yield finished
        yield _counter("slipstream_prompt_tokens", "Prompt tokens read", seen.num_prompt_tokens)
        yield _counter("slipstream_generated_tokens", "Tokens generated", seen.num_output_tokens)
        yield _counter("slipstream_steps", "Steps of the engine", seen.num_steps)
        yield _counter("slipstream_preemptions", "Streams sent back to the queue for memory", seen.num_preemptions)

    def _speculation(self) -> Iterable[Metric]:
        seen = self._monitor.snapshot()
        yield _counter("vllm:spec_decode_num_drafts", "Times a row had drafts verified", seen.num_drafts)
        yield _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", seen.num_draft_tokens)
        yield _counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", seen.num_accepted_tokens)
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position", labels=["position"]
        )
        for position, count in enumerate(seen.accepted_per_position):
            accepted.add_metric([str(position)], count)
        yield accepted
        yield _counter("slipstream_plain_row_steps", "Times a row sampled without a draft", seen.num_plain_steps)
        yield _gauge("slipstream_draft_depth", "Draft depth of most rows in the last step", seen.last_depth)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
