"""Metrics of several replicas in one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from slipstream.ray.metrics import by_replica, summed


def exposition(tokens: int, usage: float, slow: int) -> str:
    return f"""# HELP vllm:generation_tokens_total Tokens generated
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="m"}} {tokens}
# HELP vllm:kv_cache_usage_perc KV
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="m"}} {usage}
# HELP slipstream_build_info Version
# TYPE slipstream_build_info gauge
slipstream_build_info{{version="1"}} 1
# HELP seconds Time
# TYPE seconds histogram
seconds_bucket{{le="1.0"}} 4
seconds_bucket{{le="+Inf"}} {4 + slow}
seconds_count {4 + slow}
seconds_sum {slow * 2.0}
"""


TEXTS = {"a": exposition(10, 0.5, 1), "b": exposition(32, 0.1, 3)}


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_each_replica_keeps_its_own_samples() -> None:
    found = samples(by_replica(TEXTS))
    assert found["vllm:generation_tokens_total", "model_name=m", "replica=a"] == 10
    assert found["vllm:generation_tokens_total", "model_name=m", "replica=b"] == 32
    assert found["seconds_bucket", "le=+Inf", "replica=b"] == 7
    assert by_replica(TEXTS).count(b"# TYPE seconds histogram") == 1


def test_sums() -> None:
    found = samples(summed(TEXTS))
    assert found["vllm:generation_tokens_total", "model_name=m"] == 42
    assert found["vllm:kv_cache_usage_perc", "model_name=m"] == 0.3
    assert found["slipstream_build_info", "version=1"] == 1
    assert found["seconds_bucket", "le=1.0"] == 8
    assert found["seconds_bucket", "le=+Inf"] == 12
    assert found["seconds_sum",] == 8.0
