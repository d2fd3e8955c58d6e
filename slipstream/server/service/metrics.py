"""`/metrics`: the engine's counters and the latencies of requests, in Prometheus' text format.

What vLLM has is under vLLM's names and labels, which dashboards and benchmark clients already read; the rest is
`slipstream_*`. The engine counts; this file reads its snapshot when it is scraped.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream import __version__
from slipstream.engine.stats import STEP_SIZES, StatsSnapshot
from slipstream.server.service.histograms import (
    Labels,
    Latencies,
    RequestHistograms,
    RequestLatencies,
    histogram_family,
)
from slipstream.server.service.status import StatusMonitor

REASONS = ("stop", "length", "abort", "error")


class Metrics:
    def __init__(self, monitor: StatusMonitor) -> None:
        self.registry = CollectorRegistry()
        self.http = Counter(
            "slipstream_http_requests", "HTTP responses by path and status", ["path", "status"], registry=None
        )
        self.unknown_fields = Counter(
            "slipstream_unknown_fields", "Fields of requests that were ignored as unknown", registry=None
        )
        self._requests = RequestHistograms(monitor)
        collectors = (ServerCollector(monitor), EngineCollector(monitor), self._requests)
        for collector in (*collectors, WithoutCreated(self.http), WithoutCreated(self.unknown_fields)):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def latencies(self, num_choices: int, max_tokens: int | None) -> list[Latencies]:
        """For each choice of a request that has just arrived."""
        return RequestLatencies(self._requests, num_choices, max_tokens).choices


class _Collector(Collector):
    def __init__(self, monitor: StatusMonitor) -> None:
        self._monitor = monitor

    def describe(self) -> Iterable[Metric]:
        return ()


class WithoutCreated(Collector):
    """The library adds a time of creation to each counter, one more line for each that says nothing."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def collect(self) -> Iterable[Metric]:
        for family in self._counter.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def describe(self) -> Iterable[Metric]:
        return ()


class ServerCollector(_Collector):
    """There from the start, also while the model is being loaded."""

    def collect(self) -> Iterable[Metric]:
        build = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("slipstream_build", "Version of the server", value=build)
        ready = float(self._monitor.takes_work)
        yield GaugeMetricFamily("slipstream_ready", "1 while new work is taken", value=ready)
        resident = self._monitor.memory()["rss_bytes"]
        yield GaugeMetricFamily("slipstream_resident_bytes", "Resident memory of the process", value=resident)


class EngineCollector(_Collector):
    def collect(self) -> Iterable[Metric]:
        labels = self._monitor.labels
        if labels is None:
            return
        seen = self._monitor.snapshot()
        yield from self._load(seen, labels)
        yield from self._memory(seen, labels)
        yield from _prefix_cache(seen, labels)
        yield from _work(seen, labels)
        yield from _speculation(seen, labels)

    def _load(self, seen: StatsSnapshot, labels: Labels) -> Iterable[Metric]:
        yield _gauge("vllm:num_requests_running", "Streams that decode or read their prompt", seen.num_running, labels)
        yield _gauge("vllm:num_requests_waiting", "Requests in the queue", seen.num_waiting, labels)

    def _memory(self, seen: StatsSnapshot, labels: Labels) -> Iterable[Metric]:
        memory = self._monitor.memory()
        total, used = memory["kv_blocks_total"], memory["kv_blocks_used"]
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second is its name in older dashboards
            yield _gauge(
                f"vllm:{name}", "KV blocks that requests hold, 1 for all", used / total if total else 0.0, labels
            )
        config = {"block_size": str(memory["block_size"]), "num_gpu_blocks": str(total)}
        config["cache_dtype"] = self._monitor.kv_dtype
        config["mamba_ssm_cache_dtype"] = self._monitor.state_dtype
        yield _gauge("vllm:cache_config_info", "The KV pool", 1.0, {**labels, **config})
        yield _gauge("slipstream_kv_blocks_used", "KV blocks that requests hold", used, labels)
        yield _gauge("slipstream_kv_blocks", "KV blocks in all", total, labels)
        yield _gauge("slipstream_kv_bytes", "Bytes of the KV pool", memory["kv_bytes"], labels)
        yield _gauge("slipstream_state_bytes", "Bytes of recurrent states, all slots", memory["state_bytes"], labels)
        slots = seen.num_running if memory["state_bytes"] else 0
        yield _gauge("slipstream_state_slots_used", "Slots whose recurrent state is in use", slots, labels)


def _prefix_cache(seen: StatsSnapshot, labels: Labels) -> Iterable[Metric]:
    text = "Prompt tokens of requests that looked into the prefix cache"
    yield _counter("vllm:prefix_cache_queries", text, seen.num_cache_queries, labels)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found there", seen.num_cache_hits, labels)
    text = "KV blocks that the prefix cache holds, in use or not"
    yield _gauge("slipstream_prefix_cache_blocks", text, seen.num_cached_blocks, labels)
    text = "Recurrent states that the prefix cache has room for"
    yield _gauge("slipstream_prefix_cache_states", text, seen.num_states, labels)
    text = "Recurrent states that the prefix cache holds"
    yield _gauge("slipstream_prefix_cache_states_used", text, seen.num_used_states, labels)


def _work(seen: StatsSnapshot, labels: Labels) -> Iterable[Metric]:
    finished = {reason: seen.finished.get(reason, 0) for reason in REASONS}
    yield _counters("vllm:request_success", "Requests finished", "finished_reason", finished, labels)
    yield _counter("vllm:prompt_tokens", "Prompt tokens read", seen.num_prompt_tokens, labels)
    yield _counter("vllm:generation_tokens", "Tokens generated", seen.num_output_tokens, labels)
    yield _counter("vllm:num_preemptions", "Streams sent back to the queue for memory", seen.num_preemptions, labels)
    text = "Tokens that a step feeds: of prompts, and one and its drafts of each stream that decodes"
    counts = seen.step_sizes or (0,) * (len(STEP_SIZES) + 1)
    yield histogram_family("vllm:iteration_tokens_total", text, STEP_SIZES, counts, seen.num_fed, labels)
    yield _counter("slipstream_steps", "Steps of the engine", seen.num_steps, labels)


def _speculation(seen: StatsSnapshot, labels: Labels) -> Iterable[Metric]:
    yield _counter("vllm:spec_decode_num_drafts", "Times a row had drafts verified", seen.num_drafts, labels)
    yield _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", seen.num_draft_tokens, labels)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", seen.num_accepted_tokens, labels)
    yield _counters(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by position",
        "position",
        _by_position(seen.accepted_per_position),
        labels,
    )
    yield _counters(
        "slipstream_spec_decode_num_draft_tokens_per_pos",
        "Verified drafts by position",
        "position",
        _by_position(seen.drafted_per_position),
        labels,
    )
    yield _counter("slipstream_plain_row_steps", "Times a row sampled without a draft", seen.num_plain_steps, labels)
    yield _gauge("slipstream_draft_depth", "Draft depth of most rows in the last step", seen.last_depth, labels)


def _by_position(counts: Sequence[int]) -> dict[str, int]:
    return {str(position): count for position, count in enumerate(counts)}


def _gauge(name: str, text: str, value: float, labels: Labels) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Labels) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counters(name: str, text: str, label: str, values: dict[str, int], labels: Labels) -> Metric:
    """One for each value of ``label``."""
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
