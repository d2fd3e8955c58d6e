"""Numbers about the model and about an answer: the longest request, sampling defaults, vLLM's `metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import FakeServer
from fakes import FakeRunner, make_info
from test_protocols import stream

from slipstream.sampling import SamplingDefaults, SamplingParams

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}
WHOLE = {CHAT: {"messages": HELLO}, "/v1/completions": {"prompt": "hello"}}
USAGE = {"stream_options": {"include_usage": True}}
DEFAULTS = SamplingDefaults(temperature=0.3, top_k=7, top_p=0.8, min_p=0.1, repetition_penalty=1.1, source="a test")


@pytest.fixture(scope="module")
def small() -> Iterator[FakeServer]:
    """Its blocks hold less than the context."""
    runner = FakeRunner(make_info(num_blocks=10, block_size=4, max_context=128), hit=0.7)
    with FakeServer(runner, sampling_defaults=DEFAULTS) as server:
        yield server


def last_params(server: FakeServer) -> SamplingParams:
    assert isinstance(server.runner, FakeRunner)
    return [join.params for plan in server.runner.plans for join in plan.joins][-1]


def test_the_longest_request_is_one_number_everywhere(small: FakeServer) -> None:
    [entry] = small.get("/v1/models").json()["data"]
    longest = entry["max_model_len"]
    assert longest == 10 * 4
    assert small.post("/tokenize", prompt="hello").json()["max_model_len"] == longest
    assert small.get("/v1/status").json()["model"]["context"] == longest
    fits = small.post("/v1/completions", prompt="x" * (longest - 1), max_tokens=9)
    assert fits.json()["usage"] == {
        "prompt_tokens": longest - 1,
        "completion_tokens": 1,
        "total_tokens": longest,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    refused = small.post("/v1/completions", prompt="x" * longest, max_tokens=1)
    assert refused.status_code == 400
    assert f"at most {longest} fit" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_a_request_leaves_out_are_the_models(small: FakeServer, path: str) -> None:
    assert small.post(path, **PATHS[path]).status_code == 200
    params = last_params(small)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.3, 7, 0.8, 0.1)
    assert params.repetition_penalty == 1.1
    assert small.post(path, **PATHS[path], temperature=0, top_p=1.0, top_k=0).status_code == 200
    params = last_params(small)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.1)


def test_the_defaults_are_shown_as_numbers(small: FakeServer, fake: FakeServer) -> None:
    assert small.get("/v1/status").json()["sampling_defaults"] == {
        "temperature": 0.3,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "source": "a test",
    }
    assert fake.get("/v1/status").json()["sampling_defaults"] == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "source": "neutral",
    }


def check_acceptance(found: dict[str, Any], timings: dict[str, Any]) -> None:
    """As aiperf checks it: the histogram has a place for each count of accepted drafts, and agrees with the sums."""
    spec = found["speculative_decoding"]
    histogram = spec["acceptance_histogram"]
    assert len(histogram) == spec["num_spec_tokens"] + 1
    assert sum(histogram) == spec["num_spec_steps"] > 0
    assert sum(j * count for j, count in enumerate(histogram)) == spec["num_accepted_draft_tokens"]
    assert spec["num_accepted_draft_tokens"] == timings["draft_n_accepted"] > 0
    assert spec["num_draft_tokens"] == timings["draft_n"]
    steps, drafted = spec["num_spec_steps"], spec["num_draft_tokens"]
    assert spec["mean_acceptance_length"] == pytest.approx(1 + spec["num_accepted_draft_tokens"] / steps)
    assert spec["draft_acceptance_rate"] == pytest.approx(spec["num_accepted_draft_tokens"] / drafted)


@pytest.mark.parametrize("path", WHOLE)
def test_metrics_of_an_answer_in_vllms_shape(fake: FakeServer, path: str) -> None:
    body = {**WHOLE[path], "max_tokens": 30, "seed": 5}
    whole = fake.post(path, **body).json()
    check_acceptance(whole["metrics"], whole["timings"])
    with_usage = stream(fake, path, **body, **USAGE)
    assert [event for event in with_usage if "metrics" in event] == with_usage[-1:]
    assert with_usage[-1]["choices"] == []
    check_acceptance(with_usage[-1]["metrics"], with_usage[-2]["timings"])
    without = stream(fake, path, **body)
    assert [event for event in without if "metrics" in event] == without[-1:]
    check_acceptance(without[-1]["metrics"], without[-1]["timings"])


def test_metrics_of_an_answer_without_drafts_are_zeros(fake: FakeServer) -> None:
    response = fake.post(CHAT, messages=HELLO, max_tokens=9, seed=5, speculative={"enabled": False}).json()
    spec = response["metrics"]["speculative_decoding"]
    assert spec["acceptance_histogram"] == [0, 0, 0, 0]
    assert (spec["num_spec_steps"], spec["num_draft_tokens"], spec["mean_acceptance_length"]) == (0, 0, 1.0)


def test_several_choices_have_no_metrics_of_one(fake: FakeServer) -> None:
    response = fake.post(CHAT, messages=HELLO, max_tokens=9, seed=5, n=2).json()
    assert "metrics" not in response
    timings = response["timings"]
    assert timings["tokens_per_step"] > 1.0
    assert timings["speculation"].startswith("drafted in ")


def test_a_model_that_cannot_draft_has_no_metrics_of_drafting() -> None:
    with FakeServer(FakeRunner(make_info(max_depth=0))) as server:
        response = server.post(CHAT, messages=HELLO, max_tokens=4, seed=5).json()
    assert "metrics" not in response
    assert response["timings"]["speculation"] == "not drafted: the model has no MTP head"
