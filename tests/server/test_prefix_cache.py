"""The prefix cache as clients see it: switches, salts, counted tokens. The engine's answers are written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_server import ENGINE, WAIT, FakeServer, asked, events
from fakes import FakeRunner, make_info

from slipstream.engine.engine import Engine, Sink
from slipstream.engine.request import DEFAULT_CACHE, PromptCache, TokenEvent
from slipstream.sampling.params import SamplingParams
from slipstream.server.service.settings import ServerConfig

CACHED, NOTE = 4, "the cache knows no more of it"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
NUM_PROMPT = len(asked("hello"))
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    RESPONSES: {"input": "hello", "max_output_tokens": 4},
    MESSAGES: {"messages": HELLO, "max_tokens": 4},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 4}},
    "/completion": {"prompt": "hello", "n_predict": 4},
}


class Answering(Engine):
    """Says of every prompt that some of its tokens were cached, and notes how requests use the cache."""

    asked: list[PromptCache]

    def submit_many(
        self,
        prompt_tokens: Any,
        params: SamplingParams,
        sinks: Sequence[Sink],
        client: str = "",
        cache: PromptCache = DEFAULT_CACHE,
    ) -> list[str]:
        Answering.asked.append(cache)
        return super().submit_many(prompt_tokens, params, [_telling(sink) for sink in sinks], client, cache)


def _telling(sink: Sink) -> Sink:
    def tell(event: TokenEvent) -> None:
        stats = event.stats and replace(event.stats, cached_tokens=CACHED, cache_note=NOTE)
        sink(replace(event, cached_tokens=CACHED, stats=stats))

    return tell


class AnsweringServer(FakeServer):
    engine_type = Answering


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    Answering.asked = []
    runner = FakeRunner(make_info(max_context=2048, num_blocks=2048), hit=0.7)
    with AnsweringServer(runner) as server:
        yield server


def answer(server: FakeServer, path: str, **more: Any) -> dict[str, Any]:
    response = server.post(path, **BODIES[path], **more, ignore_eos=True)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


# ---- requests ----


@pytest.mark.parametrize("path", BODIES)
def test_every_path_has_the_switches(server: FakeServer, path: str) -> None:
    plain = answer(server, path)
    assert Answering.asked[-1] == PromptCache()
    assert "warnings" not in plain
    for off in ({"cache": False}, {"cache_prompt": False}):
        assert "warnings" not in answer(server, path, **off)
        assert not Answering.asked[-1].enabled
    answer(server, path, cache=True, cache_prompt=True, cache_salt="mine")
    salted = Answering.asked[-1]
    assert salted.enabled
    answer(server, path, cache_salt="other")
    assert len({"", salted.salt, Answering.asked[-1].salt}) == 3


def test_a_salt_is_bounded(server: FakeServer) -> None:
    response = server.post(CHAT, **BODIES[CHAT], cache_salt="x" * 513)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_two_keys_never_share() -> None:
    Answering.asked = []
    with AnsweringServer(config=ServerConfig(port=0, api_keys=("one", "two"))) as server:
        for key, salt in (("one", ""), ("two", ""), ("one", "x"), ("two", "x"), ("one", "x")):
            body = {**BODIES[CHAT], "cache_salt": salt}
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(server.url + CHAT, json=body, headers=headers, timeout=WAIT).status_code == 200
    salts = [cache.salt for cache in Answering.asked]
    assert len(set(salts)) == 4
    assert salts[2] == salts[4]
    assert not any("one" in salt or "two" in salt for salt in salts), "the key itself must not be kept"


def test_cache_control_may_stand_anywhere(server: FakeServer) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "hello", **mark}
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}, **mark}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text], **mark}
    body = {
        "max_tokens": 4,
        "system": [text],
        "messages": [
            {"role": "user", "content": [text], **mark},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "", **mark}, call]},
            {"role": "user", "content": [result, text]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, **mark}],
        **mark,
    }
    response = server.post(MESSAGES, **body)
    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()


# ---- what is counted ----


def test_usage_of_chat_and_completions(server: FakeServer) -> None:
    for path, num_prompt in ((CHAT, NUM_PROMPT), ("/v1/completions", len("hello"))):
        usage = answer(server, path)["usage"]
        assert usage["prompt_tokens"] == num_prompt
        assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED}
        assert usage["total_tokens"] == num_prompt + 4


def test_timings_count_what_was_read(server: FakeServer) -> None:
    for path in BODIES:
        timings = answer(server, path)["timings"]
        num_prompt = timings["prompt_n"] + timings["cached_tokens"]
        assert (timings["cached_tokens"], timings["cache_note"]) == (CACHED, NOTE)
        assert num_prompt == (NUM_PROMPT if BODIES[path].get("prompt") is None else len("hello")) or "/api" in path


def test_choices_share_a_prompt_and_prompts_are_added(server: FakeServer) -> None:
    found = server.post("/v1/completions", prompt=["hello", "hullo"], n=2, max_tokens=4, ignore_eos=True).json()
    assert found["usage"]["prompt_tokens"] == 2 * len("hello")
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * CACHED}
    assert found["usage"]["completion_tokens"] == 4 * 4
    assert found["timings"]["prompt_n"] == 2 * (len("hello") - CACHED)


def test_usage_so_far(server: FakeServer) -> None:
    asks = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "timings_per_token": True}
    with httpx.stream("POST", server.url + CHAT, json=BODIES[CHAT] | asks, timeout=WAIT) as response:
        found = [event for event in events(response.iter_lines()) if event.get("usage")]
    assert found
    for event in found:
        assert event["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED}
        assert event["timings"]["prompt_n"] == NUM_PROMPT - CACHED


def test_usage_of_responses(server: FakeServer) -> None:
    usage = answer(server, RESPONSES)["usage"]
    assert usage["input_tokens"] == NUM_PROMPT
    assert usage["input_tokens_details"] == {"cached_tokens": CACHED}


def test_usage_of_messages(server: FakeServer) -> None:
    """Cached tokens are not among the input's, in the first event of a stream as at its end."""
    expected = {
        "input_tokens": NUM_PROMPT - CACHED,
        "cache_read_input_tokens": CACHED,
        "cache_creation_input_tokens": 0,
    }
    assert answer(server, MESSAGES)["usage"] == {**expected, "output_tokens": 4}
    body = {**BODIES[MESSAGES], "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + MESSAGES, json=body, timeout=WAIT) as response:
        found = {event["type"]: event for event in events(response.iter_lines())}
    assert found["message_start"]["message"]["usage"] == {**expected, "output_tokens": 0}
    assert found["message_delta"]["usage"] == {**expected, "output_tokens": 4}


def test_counts_of_ollama_and_llama_cpp(server: FakeServer) -> None:
    chat = answer(server, "/api/chat")
    assert (chat["prompt_eval_count"], chat["prompt_eval_cached_count"]) == (NUM_PROMPT, CACHED)
    completion = answer(server, "/completion")
    assert completion["tokens_evaluated"] == len("hello")
    assert completion["timings"]["cache_n"] == CACHED
    assert completion["timings"]["prompt_n"] == len("hello") - CACHED


# ---- Claude Code ----


def test_the_billing_line_is_dropped(server: FakeServer) -> None:
    def count(system: Any) -> int:
        found = server.post("/v1/messages/count_tokens", messages=HELLO, system=system).json()
        return int(found["input_tokens"])

    billing = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=0f3a1;"
    assert count(f"{billing}\nBe brief.") == count("Be brief.")
    assert count([{"type": "text", "text": billing}, {"type": "text", "text": "Be brief."}]) == count("Be brief.")
    assert count([]) == count("")
    quoted = f"Do not write\n{billing}\n"
    assert count(quoted) == count("Do not write") + len(f"\n{billing}\n"), "only the first line is the client's own"


# ---- with the engine's own cache ----

LONG = "a conversation that is longer than a few blocks of the cache"


@pytest.fixture(scope="module")
def caching() -> Iterator[FakeServer]:
    info = make_info(max_context=512, num_blocks=512, keep_grid=4, num_states=32)
    config = ServerConfig(port=0, api_keys=("one", "two"))
    with FakeServer(FakeRunner(info, hit=0.7), config=config) as server:
        yield server


def cached(server: FakeServer, prompt: str | list[str], key: str = "one", **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
    response = httpx.post(server.url + "/v1/completions", json=body, headers={"x-api-key": key}, timeout=WAIT)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_that_comes_again_is_found(caching: FakeServer) -> None:
    prompt = f"{LONG} 1"
    assert cached(caching, prompt) == 0
    assert cached(caching, prompt, cache=False) == 0
    assert len(prompt) - 8 <= cached(caching, prompt) < len(prompt)
    assert cached(caching, prompt, cache_salt="x") == 0
    assert cached(caching, prompt, key="two") == 0
    assert cached(caching, prompt, key="two") > 0


def test_what_asked_for_no_cache_is_not_found(caching: FakeServer) -> None:
    prompt = f"2 {LONG}"
    assert cached(caching, prompt, cache=False) == 0
    assert cached(caching, prompt) == 0


def test_several_choices_of_a_cached_prompt(caching: FakeServer) -> None:
    prompts = [f"3 {LONG}", f"4 {LONG}"]
    for prompt in prompts:
        cached(caching, prompt)
    alone = [cached(caching, prompt) for prompt in prompts]
    both = cached(caching, prompts, n=2)
    assert sum(alone) - 8 <= both <= sum(alone)


def test_the_cache_shows_in_metrics_and_status(caching: FakeServer) -> None:
    def metric(name: str) -> float:
        lines = caching.get("/metrics", **{"x-api-key": "one"}).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    prompt = f"5 {LONG}"
    cached(caching, prompt)
    before = [metric(name) for name in names]
    hits = cached(caching, prompt)
    assert [metric(name) - value for name, value in zip(names, before)] == [len(prompt), hits]
    assert metric("slipstream_prefix_cache_blocks") > 0
    assert 0 < metric("slipstream_prefix_cache_states_used") <= metric("slipstream_prefix_cache_states") == 32
    assert metric("vllm:kv_cache_usage_perc") == 0, "blocks that only the cache holds are free"
    report = caching.get("/v1/status", **{"x-api-key": "one"}).json()["prefix_cache"]
    assert report["queried_tokens"] == metric(names[0])
    assert report["found_tokens"] == metric(names[1])
    assert report["states_total"] == 32
    assert report["enabled"] is True


def test_the_first_event_of_a_stream_knows_what_was_cached(caching: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4, "stream": True}
    starts = []
    for _ in range(2):
        headers = {"x-api-key": "one"}
        with httpx.stream("POST", caching.url + MESSAGES, json=body, headers=headers, timeout=WAIT) as response:
            starts.append(next(e for e in events(response.iter_lines()) if e["type"] == "message_start"))
    first, second = (start["message"]["usage"] for start in starts)
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


def test_a_server_without_a_prefix_cache() -> None:
    info = make_info(max_context=512, num_blocks=512, keep_grid=4)
    with FakeServer(FakeRunner(info), engine=replace(ENGINE, prefix_cache=False)) as server:
        assert [cached(server, LONG) for _ in range(2)] == [0, 0]
        found = server.post("/v1/completions", prompt=LONG, max_tokens=4).json()
        assert found["timings"]["cache_note"] == "the prefix cache is switched off"
        assert server.get("/v1/status").json()["prefix_cache"]["enabled"] is False
