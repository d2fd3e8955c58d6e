"""Connections that do not behave: heads, hosts, halves, clients that do not read, and too many of them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from fake_server import FakeServer, raw_post, until
from fakes import make_info
from test_behaviour_under_load import CHAT, HELLO, LONG, TrustingRunner, inside
from test_engine import GatedRunner
from uvicorn.server import ServerState

from slipstream.server.http import lifecycle
from slipstream.server.http.connection import connection_class
from slipstream.server.service.settings import ServerConfig

WHOLE = LONG | {"stream": False}


def exchange(port: int, request: bytes, half_close: bool = False) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(request)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        data = b""
        while part := connection.recv(65536):
            data += part
        return data


def get(*lines: bytes, target: bytes = b"/health", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"GET " + target + b" HTTP/" + version, *lines, b"Connection: close", b"", b""])


def post(body: dict[str, object], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


# ---- heads ----


@pytest.mark.parametrize("request_", [
    get(b"Host: localhost", b"x: " + b"y" * 40_000),
    get(b"Host: localhost", *(b"x%d: %s" % (i, b"y" * 100) for i in range(400))),
    get(b"Host: localhost", target=b"/health?" + b"y" * 40_000),
])  # fmt: skip
def test_a_large_head_in_one_packet(fake: FakeServer, request_: bytes) -> None:
    answer = exchange(fake.port, request_)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"larger than 32768 bytes" in answer
    assert b"x-request-id: req_" in answer


def test_a_head_below_the_limit(fake: FakeServer) -> None:
    assert exchange(fake.port, get(b"Host: localhost", b"x: " + b"y" * 30_000)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("lines", "target", "code"), [
    ([b"Host: localhost", b"Host: evil.example"], b"/health", b"400"),
    ([b"Host: localhost", b"Host: localhost"], b"/health", b"400"),
    ([b"Host: localhost"], b"http://evil.example/health", b"400"),
    ([b"Host: evil.example"], b"http://evil.example/health", b"403"),
    ([b"Host: localhost"], b"http://localhost/health", b"200"),
    ([b"Host: localhost"], b"//v1//models/", b"200"),
])  # fmt: skip
def test_one_host(fake: FakeServer, lines: list[bytes], target: bytes, code: bytes) -> None:
    assert exchange(fake.port, get(*lines, target=target)).startswith(b"HTTP/1.1 " + code)


def test_garbage_does_not_fill_the_log(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    fake.server._uvicorn.config.http.warnings._last = -1e9
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    caplog.set_level(logging.DEBUG)
    for _ in range(20):
        answer = exchange(fake.port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"this is not HTTP/1.1" in answer
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1


# ---- halves ----


@pytest.fixture
def gated() -> Iterator[FakeServer]:
    config = ServerConfig(port=0, queue_limit=2, keep_alive_seconds=0.05)
    with FakeServer(GatedRunner(num_blocks=256), config) as server:
        yield server


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [LONG, WHOLE], ids=["stream", "whole"])
def test_a_half_closed_client_gets_its_answer(gated: FakeServer, body: dict[str, object], version: str) -> None:
    """It closes its side long before its answer is made."""
    with socket.create_connection(("127.0.0.1", gated.port), timeout=300) as connection:
        connection.sendall(post(body, version))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: inside(gated) == 1)
        until(lambda: any(each._half_closed for each in gated.server._uvicorn.server_state.connections))
        gated.runner.fuel.put(None)
        data = b""
        while part := connection.recv(65536):
            data += part
    assert (b"HTTP/1.1 100 Continue" in data) == (version == "1.1"), "the probe; HTTP/1.0 does not know it"
    end = data.rpartition(b"HTTP/1.1 200")[2]
    assert (b"[DONE]" if body["stream"] else b'"finish_reason":"length"') in end
    assert gated.finished("abort") == 0


def test_several_requests_and_then_half_closed(fake: FakeServer) -> None:
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert exchange(fake.port, post(WHOLE) + request * 3, half_close=True).count(b"HTTP/1.1 200") == 4


def test_leaving_with_a_second_request_on_the_way(gated: FakeServer) -> None:
    connection = socket.create_connection(("127.0.0.1", gated.port), timeout=300)
    connection.sendall(post(WHOLE) + post(WHOLE))
    until(lambda: inside(gated) == 1)
    connection.close()
    until(lambda: inside(gated) == 0)
    gated.runner.fuel.put(None)
    until(lambda: gated.finished("abort") == 1)


# ---- clients that do not read ----


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little for a client that does not read."""
    monkeypatch.setattr(lifecycle, "SEND_BUFFER", 2048)


def hurry(config: ServerConfig) -> None:
    """The time to read in ends soon now, and not while a slow machine still brings the clients in."""
    object.__setattr__(config, "write_seconds", 1.0)


@pytest.mark.usefixtures("little_room")
def test_who_does_not_read_loses_the_place() -> None:
    """All places are held by clients that never read; after the write timeout others get in."""
    body = LONG | {"max_tokens": 14_000, "ignore_eos": True, "return_origins": True}
    config = ServerConfig(port=0, queue_limit=0, write_seconds=3600.0)
    runner = TrustingRunner(make_info(max_context=15_000, num_blocks=1 << 14))
    with FakeServer(runner, config) as server, ExitStack() as unread:
        for _ in range(server.engine_config.max_streams):
            unread.enter_context(raw_post(server.port, CHAT, body, room=2048))
        until(lambda: inside(server) == server.engine_config.max_streams)
        hurry(config)
        until(lambda: inside(server) == 0)
        assert server.post(CHAT, messages=HELLO, max_tokens=1).status_code == 200


@pytest.mark.usefixtures("little_room")
def test_whole_answers_that_nobody_reads_are_dropped() -> None:
    config = ServerConfig(port=0, write_seconds=3600.0)
    with FakeServer(config=config) as server, raw_post(server.port, "/tokenize", {"prompt": "x" * 100_000}, room=2048):
        connections = server.server._uvicorn.server_state.connections
        until(lambda: any(each.transport.get_write_buffer_size() for each in list(connections)))
        hurry(config)
        until(lambda: not any(each.transport.get_write_buffer_size() for each in list(connections)))


def test_who_reads_slowly_is_not_cut_off() -> None:
    """By a clock of the test: only a buffer that stands still for so long counts."""
    loop, transport = Mock(), Mock()
    transport.get_extra_info.return_value = None
    made = connection_class(ServerConfig(write_seconds=60.0))
    loop.time.return_value = 0.0
    connection = made(
        config=uvicorn.Config(Mock(), log_config=None), server_state=ServerState(), app_state={}, _loop=loop
    )
    connection.connection_made(transport)
    for second, unsent in [(0, 0), (50, 900), (100, 800), (155, 800), (210, 10), (265, 10)]:
        loop.time.return_value = float(second)
        transport.get_write_buffer_size.return_value = unsent
        connection.check()
        assert not transport.abort.called, second
    loop.time.return_value = 271.0
    connection.check()
    assert transport.abort.called


def test_answers_of_detokenize_are_bounded(fake: FakeServer) -> None:
    limit = fake.get("/v1/models").json()["data"][0]["max_model_len"]
    assert fake.post("/detokenize", tokens=[1] * limit).status_code == 200
    refused = fake.post("/detokenize", tokens=[1] * (limit + 1))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tokens"


# ---- too many of them ----


def test_more_connections_than_allowed() -> None:
    with FakeServer(config=ServerConfig(port=0, max_connections=3)) as server:
        connections = server.server._uvicorn.server_state.connections
        until(lambda: not connections)
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=300) for _ in range(3)]
        until(lambda: len(connections) == 3)
        answer = exchange(server.port, post(WHOLE))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5\r\n" in answer
        held.pop().close()
        until(lambda: len(connections) == 2)
        assert httpx.get(f"{server.url}/health", timeout=300).status_code == 200
        for connection in held:
            connection.close()
        until(lambda: not server.server._uvicorn.config.http.refused)


def test_silence_of_a_refused_connection_is_short() -> None:
    with FakeServer(config=ServerConfig(port=0, max_connections=1)) as server:
        connections = server.server._uvicorn.server_state.connections
        until(lambda: not connections)
        with socket.create_connection(("127.0.0.1", server.port), timeout=300):
            until(lambda: len(connections) == 1)
            assert exchange(server.port, b"") == b""
