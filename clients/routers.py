"""Routers of other projects in front of two servers of ours: chats, streams, conversations that meet their prefix
cache, API keys path by path, and a server that is killed.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from clients.setting import ClientFailure, Setting, server_process

SMALL = ("--max-context", "2048", "--max-streams", "4")
CHECKS = ("--health-check-endpoint", "/ready", "--health-check-interval-secs", "1")
KEY = "a-key-of-the-servers"
CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SECONDS = 300.0
NUM_CONVERSATIONS, NUM_TURNS, ATTEMPTS = 8, 3, 5
SLACK = 32  # tokens at the end of a prompt that the next one need not find in the cache
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION},
    "/v1/completions": {"prompt": "The sea is"},
    "/v1/messages": {"messages": QUESTION},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/tokenize": {"prompt": "The sea is"},
}


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    def json(self) -> Any:
        if self.status != 200:
            raise ClientFailure(f"HTTP {self.status}: {self.text[:300]}")
        return json.loads(self.text)


def post(url: str, path: str, body: dict[str, Any], more: dict[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **(more or {})}
    connection.request("POST", path, json.dumps({"model": "default", "max_tokens": 4, **body}), headers)
    try:
        answer = connection.getresponse()
        return Answer(answer.status, answer.read().decode())
    except (http.client.HTTPException, OSError) as error:
        return Answer(0, f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def router(program: str, *command: str) -> Callable[[Setting, str], str]:
    """A client's run: the server that it is given is not needed, for one is killed."""

    def run(setting: Setting, _: str) -> str:
        with (
            server_process(*SMALL, "--api-key", KEY) as (one, process),
            server_process(*SMALL, "--api-key", KEY) as (two, _process),
            _listening(setting, [program, *command], one, two) as url,
        ):
            _same_answers(url, two)
            found = [_conversations(url, (one, two)), _keys(url)]
            process.kill()
            return "; ".join([*found, _after_a_death(url)])

    return run


@contextmanager
def _listening(setting: Setting, command: list[str], one: str, two: str) -> Iterator[str]:
    port, metrics_port = _free_ports()
    address = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))
    with setting.running(*command, *address, *CHECKS, "--worker-urls", one, two):
        url = f"http://127.0.0.1:{port}"
        _until(lambda: _answers(url))
        yield url


def _free_ports() -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return [each.getsockname()[1] for each in (first, second)]


def _answers(url: str) -> bool:
    try:
        return post(url, CHAT, {"messages": QUESTION}).status == 200
    except OSError:
        return False


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > end:
            raise ClientFailure(f"not in {SECONDS:g} s")
        time.sleep(0.2)


def _same_answers(url: str, direct: str) -> None:
    """Whole and streamed, with a field that only we know."""
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 16, "speculative": {"enabled": False}}
    expected, got = (post(each, CHAT, body).json() for each in (direct, url))
    text = expected["choices"][0]["message"]["content"]
    if got["choices"][0]["message"]["content"] != text:
        raise ClientFailure(f"{got} instead of {text!r}")
    if warnings := got.get("warnings"):
        raise ClientFailure(f"fields that we do not know: {warnings}")
    lines = post(url, CHAT, {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    if streamed != text or "data: [DONE]" not in lines:
        raise ClientFailure(f"{streamed!r} instead of {text!r}")


def _conversations(url: str, servers: tuple[str, str]) -> str:
    """Each turn must find the one before in the cache of the server it came to, and both servers must have some."""
    for attempt in range(ATTEMPTS):
        before = [_num_answered(each) for each in servers]
        names = [f"{attempt}.{i}" for i in range(NUM_CONVERSATIONS)]
        with ThreadPoolExecutor(NUM_CONVERSATIONS) as threads:
            missed = sum(threads.map(partial(_num_missed, url), names))
        shares = [_num_answered(each) - then for each, then in zip(servers, before)]
        if missed:
            raise ClientFailure(f"{missed} turns did not meet their cache; requests by server: {shares}")
        if all(shares):
            return f"all turns of {NUM_CONVERSATIONS} talks met their cache, requests by server {shares}"
    raise ClientFailure(f"one server had all requests, {ATTEMPTS} times")


def _num_missed(url: str, name: str) -> int:
    talk: list[dict[str, str]] = []
    size = missed = 0
    for turn in range(NUM_TURNS):
        text = f"{name}: this is turn {turn} of talk {name}. " + f"Tell me of the number {name}. " * 12
        talk.append({"role": "user", "content": text})
        found = post(url, CHAT, {"messages": talk, "temperature": 0}, {"x-session-id": f"talk {name}"}).json()
        talk.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        missed += found["timings"]["cached_tokens"] < size - SLACK
        size = found["usage"]["prompt_tokens"]
    return missed


def _num_answered(url: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    connection.request("GET", "/v1/status", headers={"Authorization": f"Bearer {KEY}"})
    status = Answer(200, connection.getresponse().read().decode()).json()
    connection.close()
    return sum(status["load"]["requests"].values())


def _keys(url: str) -> str:
    codes = {path: post(url, path, body).status for path, body in PATHS.items()}
    if codes[CHAT] != 200:
        raise ClientFailure(f"the key was not passed on: {codes}")
    return "with a key " + ", ".join(f"{path} {code}" for path, code in codes.items())


def _after_a_death(url: str) -> str:
    """Some requests may fail until the router has noticed; none may hang."""
    codes = [post(url, CHAT, {"messages": [{"role": "user", "content": f"Question {i}"}]}).status for i in range(12)]
    _until(lambda: all(_answers(url) for _ in range(6)))
    return f"after a server's death {sum(code != 200 for code in codes)} of 12 requests failed {sorted(set(codes))}"
