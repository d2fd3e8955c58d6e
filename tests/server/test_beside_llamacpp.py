"""The same requests to llama.cpp's own server on the same file: every field of its answers is in ours, too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_server import WAIT, events
from real_server import RealServer

from slipstream.load.default_model import default_model_path

SCRIPT = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx, params.warmup, params.endpoint_slots = 2, 2048, False, True
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""
# Not ours: its web page's settings, markers for images, details of its chat parser and sampling backend.
PAGE = {"cors_proxy_enabled", "media_marker", "ui", "ui_settings"}
PARSER = {"chat_format", "generation_prompt", "reasoning_format", "reasoning_in_content"}
INTERNAL = PARSER | {
    "backend_sampling",
    "dry_sequence_breakers",
    "grammar_lazy",
    "grammar_triggers",
    "preserved_tokens",
    "speculative.types",
}
PROMPT = "The capital of France is"
GREEDY = {"prompt": PROMPT, "n_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def theirs() -> Iterator[httpx.Client]:
    pytest.importorskip("xllamacpp")
    command = [sys.executable, "-c", SCRIPT, str(default_model_path())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("at "))
        with httpx.Client(base_url=address, timeout=WAIT, headers={"connection": "close"}) as client:
            yield client
        process.communicate()


@pytest.fixture(scope="module")
def ours(real: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=WAIT) as client:
        yield client


def missing(theirs: Any, ours: Any) -> set[str]:
    """Fields that only llama.cpp has, at any depth."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return (theirs.keys() - ours.keys()).union(*(missing(theirs[key], ours.get(key)) for key in theirs))
    if isinstance(theirs, list) and isinstance(ours, list) and theirs and ours:
        return missing(theirs[0], ours[0])
    return set()


def test_props_and_slots(theirs: httpx.Client, ours: httpx.Client) -> None:
    props = missing(theirs.get("/props").json(), ours.get("/props").json())
    assert {name for name in props if not name.startswith("supports_")} <= PAGE | INTERNAL
    assert not missing(theirs.get("/slots").json(), ours.get("/slots").json())
    assert theirs.get("/health").json() == ours.get("/health").json()
    assert theirs.get("/lora-adapters").json() == ours.get("/lora-adapters").json()


def test_completion(theirs: httpx.Client, ours: httpx.Client) -> None:
    body = {**GREEDY, "n_probs": 2, "return_tokens": True}
    expected, found = (client.post("/completion", json=body).json() for client in (theirs, ours))
    assert missing(expected, found) <= INTERNAL
    for field in ("content", "tokens", "tokens_predicted", "tokens_evaluated", "stop_type", "prompt", "truncated"):
        assert found[field] == expected[field], field
    assert [each["id"] for each in found["completion_probabilities"]] == expected["tokens"]


def test_completion_stream(theirs: httpx.Client, ours: httpx.Client) -> None:
    body = {**GREEDY, "stream": True, "timings_per_token": True}
    expected, found = (client.post("/completion", json=body) for client in (theirs, ours))
    theirs_events, our_events = (events(iter(each.text.splitlines())) for each in (expected, found))
    assert missing(theirs_events[0], our_events[0]) <= {
        "cache_n",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_per_token_ms",
    }
    assert missing(theirs_events[-1], our_events[-1]) <= INTERNAL
    text = ["".join(each["content"] for each in events) for events in (theirs_events, our_events)]
    assert text[0] == text[1]
    assert expected.headers["content-type"].partition(";")[0] == found.headers["content-type"].partition(";")[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/apply-template", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"content": "Hello \u00e9\U0001f600<|im_end|>", "with_pieces": True}),
        ("/tokenize", {"content": "Hello<|im_end|>", "parse_special": False}),
        ("/tokenize", {"content": ["Hello", 2, " you"], "add_special": True}),
        ("/detokenize", {"tokens": [19556, 2]}),
    ],
)
def test_the_same_text_and_tokens(theirs: httpx.Client, ours: httpx.Client, path: str, body: dict[str, Any]) -> None:
    expected, found = (client.post(path, json=body).json() for client in (theirs, ours))
    assert {key: found[key] for key in expected} == expected, json.dumps(found)


@pytest.mark.parametrize("prompt", [["Hello", "World"], [504, "capital"], [[19556], "Hello"]])
def test_prompts_are_read_the_same_way(theirs: httpx.Client, ours: httpx.Client, prompt: Any) -> None:
    fields = ["index", "tokens_evaluated", "generation_settings/n_predict"]
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "response_fields": fields}
    expected, found = (client.post("/completion", json=body).json() for client in (theirs, ours))
    assert found == expected
