"""deploy/nginx and deploy/haproxy: which server answers whom, and what is passed on, while both servers are well."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import FakeServer
from real_server import WAIT
from routers import KINDS, Routed, chat, routing, until
from test_engine import GatedRunner

NUM_SESSIONS = 12
KEY = "a-key"
LONG = 30_000  # tokens: ten minutes at the servers' pace


def who(routed: Routed, bodies: Callable[[int, int], dict[str, Any]]) -> list[set[str]]:
    """Who answered the three turns of each conversation. ``bodies``: by conversation and turn."""
    return [{routed.ask(**bodies(i, turn)) for turn in range(3)} for i in range(NUM_SESSIONS)]


def turns(i: int, turn: int, **more: Any) -> list[dict[str, Any]]:
    return chat(f"Question {i}", *(f"Text {j}" for j in range(2 * turn)), **more)


def parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with lists of parts."""
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def assert_sticks(seen: list[set[str]]) -> None:
    assert all(len(each) == 1 for each in seen), seen
    assert set.union(*seen) == {"one", "two"}, seen


def test_a_session_stays_on_its_server(routed: Routed) -> None:
    bodies = [{"x-session-id": f"session {i}"} for i in range(NUM_SESSIONS)]
    assert_sticks([{routed.ask(headers, messages=turns(0, turn)) for turn in range(3)} for headers in bodies])


IN_BODIES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "prompt_cache_key": lambda i, turn: {"messages": turns(turn, turn), "prompt_cache_key": f"key {i}"},
    "after a long text": lambda i, turn: {"messages": chat("x" * 30_000 * turn), "prompt_cache_key": f"key {i}"},
    "user_id": lambda i, turn: {"messages": turns(turn, turn), "metadata": {"user_id": f"user {i}"}},
    "first message": lambda i, turn: {"messages": turns(i, turn)},
    "a list of parts": lambda i, turn: {"messages": parts(turns(i, turn))},
    "after a system message": lambda i, turn: {"messages": turns(i, turn, system="You are kind.")},
    "escapes": lambda i, turn: {"messages": chat(f"\u4e2d {i} \\user \"", *(f"\u00e9 {j}" for j in range(2 * turn)))},
    "responses": lambda i, turn: {"path": "/v1/responses", "input": turns(i, turn), "instructions": "Be kind."},
    "messages": lambda i, turn: {"path": "/v1/messages", "messages": turns(i, turn), "system": "Be kind."},
}  # fmt: skip


@pytest.mark.parametrize("where", IN_BODIES)
@pytest.mark.parametrize("routed", ["haproxy"], indirect=True)
def test_haproxy_finds_the_conversation_in_the_body(routed: Routed, where: str) -> None:
    assert_sticks(who(routed, IN_BODIES[where]))


@pytest.mark.parametrize("routed", ["haproxy"], indirect=True)
def test_the_order_of_the_keys(routed: Routed) -> None:
    one, two = (routed.session_on(name)["x-session-id"] for name in ("one", "two"))
    metadata = {"metadata": {"user_id": two}}
    assert routed.ask({"x-session-id": one}, prompt_cache_key=two, **metadata) == "one"
    assert routed.ask(prompt_cache_key=one, **metadata) == "one"
    assert routed.ask(prompt_cache_key="", **metadata) == "two"
    assert routed.ask({"x-session-id": ""}, messages=chat(one)) == "one"
    assert routed.ask(messages=chat(two), metadata={}) == "two"
    assert routed.ask(path="/v1/responses", input=one) == "one"
    assert routed.ask(path="/v1/responses", input=two) == "two"


@pytest.mark.skipif(sys.platform != "linux", reason="needs more than one loopback address: Linux")
def test_requests_without_a_key_spread(routed: Routed) -> None:
    """HAProxy takes turns; nginx goes by the client's address."""
    seen = []
    for i in range(32):
        with httpx.Client(transport=httpx.HTTPTransport(local_address=f"127.0.1.{i}")) as client:
            body = {"prompt": "Hi", "max_tokens": 1}
            seen.append(client.post(f"{routed.router.url}/v1/completions", json=body, timeout=WAIT).json()["model"])
    assert min(seen.count("one"), seen.count("two")) >= 4, seen
    if routed.kind == "nginx":
        assert len({routed.ask(prompt="Hi", path="/v1/completions") for _ in range(8)}) == 1


def stream(routed: Routed, headers: dict[str, str], **body: Any) -> Any:
    body = {"messages": chat("Hi"), "stream": True, **body}
    return httpx.stream("POST", f"{routed.router.url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT)


def test_who_leaves_is_aborted(routed: Routed) -> None:
    before = routed.requests("one")["abort"]
    with stream(routed, routed.session_on("one"), max_tokens=LONG) as answer:
        lines = answer.iter_lines()  # the client has left once nothing holds them
        next(line for line in lines if "<" in line)
        until(lambda: routed.running("one") == 1)
    until(lambda: routed.requests("one")["abort"] == before + 1)
    until(lambda: routed.running("one") == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_event_comes_before_the_next_is_written(kind: str, tmp_path: Path) -> None:
    """The server computes a step only when the client has what the step before wrote."""
    runner = GatedRunner()
    with FakeServer(runner) as server, routing(kind, tmp_path, [server.port] * 2) as router:
        body = {
            "prompt": "Hi",
            "max_tokens": 12,
            "stream": True,
            "ignore_eos": True,
            "seed": 1,
        }  # whose tokens all have a text
        runner.fuel.put(1)
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=WAIT) as answer:
            texts = (line for line in answer.iter_lines() if line.startswith("data: {"))
            for _ in range(3):
                assert next(texts)
                runner.fuel.put(1)
            runner.fuel.put(None)
            assert list(texts)


def test_who_leaves_before_the_answer_is_aborted(routed: Routed) -> None:
    before = routed.requests("one")["abort"]
    body = json.dumps({"messages": chat("Hi"), "max_tokens": LONG}).encode()
    session = routed.session_on("one")["x-session-id"]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-session-id: {session}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", routed.router.port)) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: routed.running("one") == 1)
    until(lambda: routed.requests("one")["abort"] == before + 1)


def test_bodies_as_large_as_the_servers_take_them(routed: Routed) -> None:
    """One that is too long for the model reaches the server; for one that is too large the error is JSON."""
    fits = routed.post(messages=chat("x" * ((4 << 20) - 200)))
    assert (fits.status_code, fits.json()["error"]["code"]) == (400, "context_length_exceeded"), fits.text
    over = routed.post(messages=chat("x" * (5 << 20)))
    assert over.status_code == 413
    assert "too large" in over.json()["error"]["message"] or "larger" in over.json()["error"]["message"]


@contextmanager
def listening(seen: list[dict[str, str]]) -> Iterator[int]:
    """A server that notes the headers of POSTs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_what_servers_are_told_of_a_request(kind: str, tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []
    sent = {"Authorization": "Bearer mine", "Host": "models.example:8080", "x-request-id": "r1"}
    with listening(seen) as port, routing(kind, tmp_path, [port, port]) as router:
        assert httpx.post(router.url, json={}, headers=sent, timeout=WAIT).status_code == 200
    [headers] = seen
    assert headers["x-forwarded-for"] == "127.0.0.1"
    assert {name: headers[name.lower()] for name in sent} == sent


@pytest.mark.parametrize("kind", KINDS)
def test_servers_with_a_key(kind: str, tmp_path: Path) -> None:
    """HAProxy's checks need none; what clients send is passed on."""
    routed = Routed(kind, tmp_path, "--api-key", KEY, headers={"Authorization": f"Bearer {KEY}"})
    try:
        assert routed.ask({"Authorization": f"Bearer {KEY}"}) in ("one", "two")
        assert routed.ask({"x-api-key": KEY, "Authorization": ""}) in ("one", "two")
        assert routed.post({"Authorization": "Bearer another"}).status_code == 401
    finally:
        routed.close()
