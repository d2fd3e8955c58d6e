"""`/metrics` as vLLM's dashboards read it, with counts that agree with what the requests did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from slipstream import __version__
from slipstream.server.service.histograms import Histogram
from slipstream.server.service.metrics import Metrics
from slipstream.server.service.status import StatusMonitor

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
BOUNDS = (0.1, 0.5, 2.5)
SEEN = [(0.05, 1), (0.1, 3), (0.3, 2), (9.0, 4)]  # seconds, how often
LABELS = {"model_name": "fake", "engine": "0"}

HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
)
# What the Grafana dashboards in vLLM's examples query, those of older releases included, and its counters of drafting.
READ_BY_DASHBOARDS = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "cache_config_info",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
}


class Exported(Collector):
    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram

    def collect(self) -> Iterator[Metric]:
        yield self._histogram.family({"model_name": "m"})


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_our_histogram_exports_what_the_librarys_exports() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = Histogram("x_seconds", "Some.", BOUNDS)
    other = Theirs("x_seconds", "Some.", ["model_name"], buckets=BOUNDS, registry=theirs).labels("m")
    ours.register(Exported(own))
    for seconds, times in SEEN:
        own.observe(seconds, times)
        for _ in range(times):
            other.observe(seconds)
    assert lines(ours) == lines(theirs)


class Samples:
    """One scrape, by name and the labels that are not the model's."""

    def __init__(self, text: str) -> None:
        self.all = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def __getitem__(self, key: str | tuple[str, str]) -> float:
        name, value = (key, None) if isinstance(key, str) else key
        [found] = [
            sample.value
            for sample in self.all
            if sample.name == name and (value is None or value in sample.labels.values())
        ]
        return float(found)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeServer, list[dict[str, int]]]]:
    """A server of its own, and the usage of the requests it has answered."""
    with FakeServer() as server:
        asked = [
            {"messages": HELLO, "max_tokens": 20, "seed": 5},
            {"messages": HELLO, "max_tokens": 7, "seed": 6, "n": 3},
            {"messages": HELLO, "seed": 7, "speculative": {"enabled": False}},
        ]
        yield server, [server.post(CHAT, **body).json()["usage"] for body in asked]


def test_every_metric_that_dashboards_read_is_there_with_the_models_name(
    served: tuple[FakeServer, list[dict[str, int]]],
) -> None:
    samples = Samples(served[0].get("/metrics").text)
    named = {sample.name.removeprefix("vllm:") for sample in samples.all if LABELS.items() <= sample.labels.items()}
    assert not READ_BY_DASHBOARDS - named
    vllm = [sample for sample in samples.all if sample.name.startswith("vllm:")]
    assert all(LABELS.items() <= sample.labels.items() for sample in vllm)
    assert not [sample.name for sample in samples.all if sample.name.endswith("_created")]


def test_counts_agree_with_what_the_requests_did(served: tuple[FakeServer, list[dict[str, int]]]) -> None:
    server, usage = served
    samples, status = Samples(server.get("/metrics").text), server.get("/v1/status").json()
    spec, load = status["speculation"], status["load"]
    generated = sum(each["completion_tokens"] for each in usage)
    assert samples["vllm:generation_tokens_total"] == load["generated_tokens"] == generated
    assert samples["vllm:prompt_tokens_total"] == load["prompt_tokens"] == 5 * len("u:hello\n")
    for reason, count in load["requests"].items():
        assert samples["vllm:request_success_total", reason] == count
    assert sum(load["requests"].values()) == 5
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
        assert samples[f"vllm:{name}_count"] == 5
    for name in ("prefill", "decode", "inference"):
        assert samples[f"vllm:request_{name}_time_seconds_count"] == 5
    assert samples["vllm:request_prompt_tokens_sum"] == 5 * len("u:hello\n")
    assert samples["vllm:request_generation_tokens_sum"] == generated
    assert samples["vllm:inter_token_latency_seconds_count"] == generated - 5
    assert samples["vllm:request_params_n_count"] == samples["vllm:request_max_num_generation_tokens_count"] == 3
    assert samples["vllm:request_params_n_sum"] == 1 + 3 + 1
    assert samples["vllm:request_params_max_tokens_count"] == 2
    assert samples["vllm:request_params_max_tokens_sum"] == 20 + 7
    assert samples["vllm:iteration_tokens_total_count"] == samples["slipstream_steps_total"] == load["steps"]
    assert spec["tokens_per_step"] == pytest.approx(generated / (spec["drafts"] + spec["plain_row_steps"]), abs=1e-3)
    assert spec["draft_share"] == pytest.approx(spec["drafts"] / (spec["drafts"] + spec["plain_row_steps"]), abs=1e-3)
    assert spec["tokens_per_step"] < spec["mean_accepted_length"]


def test_the_counters_of_drafting(served: tuple[FakeServer, list[dict[str, int]]]) -> None:
    samples, spec = Samples(served[0].get("/metrics").text), served[0].get("/v1/status").json()["speculation"]
    assert samples["vllm:spec_decode_num_drafts_total"] == spec["drafts"] > 0
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == spec["draft_tokens"] > 0
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == spec["accepted_tokens"] > 0
    assert spec["mean_accepted_length"] == pytest.approx(1 + spec["accepted_tokens"] / spec["drafts"], abs=1e-3)
    by_position = {
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": spec["accepted_per_position"],
        "slipstream_spec_decode_num_draft_tokens_per_pos_total": spec["drafted_per_position"],
    }
    for name, counts in by_position.items():
        found = {each.labels["position"]: each.value for each in samples.all if each.name == name}
        assert found == {str(position): count for position, count in enumerate(counts) if position < 2}


def test_memory_the_build_and_the_process(served: tuple[FakeServer, list[dict[str, int]]]) -> None:
    server, _ = served
    samples, memory = Samples(server.get("/metrics").text), server.get("/v1/status").json()["memory"]
    assert samples["slipstream_kv_blocks"] == memory["kv_blocks_total"] == 64
    assert memory["kv_bytes"] == 64 * 4 * 8
    assert samples["vllm:kv_cache_usage_perc"] == samples["vllm:gpu_cache_usage_perc"] == 0.0
    assert samples["slipstream_build_info", __version__] == 1
    assert samples["slipstream_ready"] == 1
    assert "slipstream_http_requests" in samples.families
    info = samples.families["vllm:cache_config_info"].samples[0]
    types = {"cache_dtype": "int16", "mamba_ssm_cache_dtype": "int8"}
    assert info.labels == {**LABELS, "block_size": "4", "num_gpu_blocks": "64", **types}
    device = server.get("/v1/status").json()["device"]
    assert (device["kv_dtype"], device["state_dtype"]) == ("int16", "int8")


def test_what_llm_d_reads(served: tuple[FakeServer, list[dict[str, int]]]) -> None:
    """And the Gateway API inference extension: one gauge each; two labels that are whole numbers."""
    families = Samples(served[0].get("/metrics").text).families
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert families[f"vllm:{name}"].type == "gauge"
        assert len(families[f"vllm:{name}"].samples) == 1
    [cache] = families["vllm:cache_config_info"].samples
    assert int(cache.labels["block_size"]) > 0 < int(cache.labels["num_gpu_blocks"])


def test_a_server_that_is_loading_has_no_model_to_count_for() -> None:
    text = generate_latest(Metrics(StatusMonitor(4)).registry).decode()
    samples = Samples(text)
    assert samples["slipstream_ready"] == 0
    assert not [sample.name for sample in samples.all if sample.name.startswith("vllm:")]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the library reads /proc")
def test_the_process_is_measured() -> None:
    samples = Samples(generate_latest(Metrics(StatusMonitor(4)).registry).decode())
    assert samples["process_resident_memory_bytes"] > 0
    assert samples["process_cpu_seconds_total"] > 0
