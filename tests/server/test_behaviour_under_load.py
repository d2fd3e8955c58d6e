"""Behaviour under load, on a runner that the test steps: disconnects, queueing, slow readers, draining, failure."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from fake_server import ENGINE, FakeServer, asked, events, raw_post, said, until
from fakes import FakeRunner, Row, make_info
from test_engine import GatedRunner

from slipstream.grammar import GrammarCompiler, compiler
from slipstream.server.http import lifecycle
from slipstream.server.service import prepare, service
from slipstream.server.service.settings import ServerConfig

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG = {"messages": HELLO, "max_tokens": 60, "seed": 5, "stream": True}
ANSWER = said(asked("hello"), 5, 60)


@pytest.fixture
def gated() -> Iterator[FakeServer]:
    with FakeServer(
        GatedRunner(num_blocks=256), ServerConfig(port=0, queue_limit=2, keep_alive_seconds=0.05)
    ) as server:
        yield server
        assert server.engine is not None
        server.runner.fuel.put(None)
        until(lambda: server.engine.snapshot().num_used_blocks == 0)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def inside(server: FakeServer) -> int:
    """Requests that were given to the engine and whose answer is not out yet."""
    return len(server.server._service._live)


def read_until(connection: socket.socket, mark: bytes, size: int = 65536) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(size)
        assert part, f"it ended without {mark!r}: {data[-200:]!r}"
        data += part
    return data


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["prefill", "first-token", "decode"])
def test_leaving_aborts_within_a_step(gated: FakeServer, steps: int) -> None:
    """The runner takes no further step than the one under way before the request is gone."""
    connection = raw_post(gated.port, CHAT, LONG)
    until(lambda: len(gated.runner.plans) == 1)
    for _ in range(steps):
        gated.runner.fuel.put(1)
    until(lambda: len(gated.runner.plans) == 1 + steps)
    connection.close()
    until(lambda: inside(gated) == 0)
    gated.runner.fuel.put(None)  # it may run as it likes now
    until(lambda: gated.finished("abort") == 1)
    assert gated.engine is not None
    until(lambda: gated.engine.snapshot().num_used_blocks == 0)
    assert all(not plan.rows for plan in gated.runner.plans[1 + steps :])


def test_leaving_the_queue_aborts(gated: FakeServer) -> None:
    running = [raw_post(gated.port, CHAT, LONG) for _ in range(ENGINE.max_streams)]
    until(lambda: inside(gated) == ENGINE.max_streams)
    waiting = raw_post(gated.port, CHAT, LONG)
    until(lambda: inside(gated) == ENGINE.max_streams + 1)
    waiting.close()
    until(lambda: inside(gated) == ENGINE.max_streams)
    gated.runner.fuel.put(None)
    for connection in running:
        read_until(connection, b"[DONE]")
        connection.close()
    until(lambda: gated.finished("abort") == 1)
    assert sum(len(plan.joins) for plan in gated.runner.plans) == ENGINE.max_streams, "it never ran"


def test_leaving_before_the_body_is_complete(gated: FakeServer) -> None:
    for sent in (0, 1, 20):
        raw_post(gated.port, CHAT, LONG, sent).close()
    until(lambda: len(gated.server._uvicorn.server_state.tasks) == 0)
    assert not gated.runner.plans
    assert inside(gated) == 0


def test_not_streaming_and_leaving(gated: FakeServer) -> None:
    connection = raw_post(gated.port, CHAT, LONG | {"stream": False})
    until(lambda: inside(gated) == 1)
    connection.close()
    until(lambda: inside(gated) == 0)
    gated.runner.fuel.put(None)
    until(lambda: gated.finished("abort") == 1)


def test_leaving_leaves_every_choice(gated: FakeServer) -> None:
    connection = raw_post(gated.port, CHAT, LONG | {"n": 3})
    until(lambda: inside(gated) == 1)
    connection.close()
    until(lambda: inside(gated) == 0)
    gated.runner.fuel.put(None)
    until(lambda: gated.finished("abort") == 3)


def test_every_choice_counts_against_the_queue_limit(gated: FakeServer) -> None:
    room = ENGINE.max_streams + 2
    connection = raw_post(gated.port, CHAT, LONG | {"n": 4})
    until(lambda: inside(gated) == 1)
    assert gated.post(CHAT, messages=HELLO, n=room - 4 + 1).status_code == 429
    connection.close()


def test_a_stop_string_ends_the_engine_s_work(gated: FakeServer, threads: ThreadPoolExecutor) -> None:
    """Found in the second step, far from the length limit: the runner does not go on."""
    future = threads.submit(gated.post, CHAT, messages=HELLO, seed=5, stop=ANSWER[1])
    until(lambda: len(gated.runner.plans) == 1)
    gated.runner.fuel.put(1)
    gated.runner.fuel.put(1)
    assert gated.engine is not None
    until(lambda: not gated.engine._inbox.empty())
    gated.runner.fuel.put(None)
    assert future.result().json()["choices"][0]["message"]["content"] == ANSWER[0]
    assert future.result().json()["usage"]["completion_tokens"] == 2
    until(lambda: gated.finished("stop") == 1)
    assert all(not plan.rows for plan in gated.runner.plans[3:])


def test_a_full_queue_answers_429(gated: FakeServer, threads: ThreadPoolExecutor) -> None:
    limit = ENGINE.max_streams + gated.config.queue_limit
    taken = [threads.submit(gated.post, CHAT, **LONG) for _ in range(limit)]
    until(lambda: inside(gated) == limit)
    for path, kind in ((CHAT, "rate_limit_error"), ("/v1/messages", "rate_limit_error")):
        refused = gated.post(path, messages=HELLO, max_tokens=1)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == kind
    gated.runner.fuel.put(None)
    for each in taken:
        assert each.result().status_code == 200
    assert gated.post(CHAT, messages=HELLO, max_tokens=1).status_code == 200


@pytest.mark.parametrize(("path", "sign"), [(CHAT, ": keep-alive"), ("/v1/messages", "event: ping")])
def test_a_sign_of_life_during_a_long_prefill(gated: FakeServer, path: str, sign: str) -> None:
    with httpx.stream("POST", gated.url + path, json=LONG, timeout=300) as response:
        lines = response.iter_lines()
        seen: list[str] = []
        while seen.count(sign) < 2:
            seen.append(next(lines))
        gated.runner.fuel.put(None)
        seen += lines
    found = events(iter(seen))
    deltas = [each["delta"]["text"] for each in found if each.get("type") == "content_block_delta"]
    deltas += [c["delta"].get("content", "") for each in found for c in each.get("choices", [])]
    assert "".join(deltas) == ANSWER


class TrustingRunner(FakeRunner):
    """Does not check what it wrote before: for long answers."""

    def _check_memory(self, row: Row) -> None:
        pass


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little for a client that does not read, so that a short answer is too much already."""
    monkeypatch.setattr(lifecycle, "SEND_BUFFER", 2048)


@pytest.mark.usefixtures("little_room")
def test_a_slow_reader_slows_no_other_client() -> None:
    """It reads nothing at all while its answer is made and others are served; then it gets all its text."""
    long = LONG | {"max_tokens": 14_000, "ignore_eos": True, "return_origins": True}
    with FakeServer(TrustingRunner(make_info(max_context=15_000, num_blocks=4096))) as server:
        slow = raw_post(server.port, CHAT, long, room=2048)
        until(lambda: server.finished("length") == 1)  # the engine is done with it, read or not
        assert inside(server) == 1, "it still has text to send"
        other = server.post(CHAT, messages=HELLO, max_tokens=60, seed=5).json()
        assert other["choices"][0]["message"]["content"] == ANSWER
        data = read_until(slow, b"[DONE]", size=700)
        slow.close()
        lines = [line for line in data.decode().split("\r\n") if line.startswith("data: ")]
        found = events(line for block in lines for line in block.splitlines())
        text = "".join(c["delta"].get("content", "") for each in found for c in each["choices"])
        assert text.startswith(said(asked("hello"), 5, 20)[:10])
        assert found[-1]["timings"]["predicted_n"] == 14_000
        assert server.engine is not None
        assert server.engine.snapshot().num_used_blocks == 0


def test_a_body_that_does_not_come() -> None:
    with FakeServer(config=ServerConfig(port=0, body_seconds=2.0)) as server:
        with raw_post(server.port, CHAT, LONG, sent=10) as connection:
            assert read_until(connection, b"did not arrive").startswith(b"HTTP/1.1 408")
        assert server.post(CHAT, messages=HELLO, max_tokens=1).status_code == 200


def test_a_head_without_end(fake: FakeServer) -> None:
    with socket.create_connection(("127.0.0.1", fake.port), timeout=300) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 60_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_several_requests_on_one_connection(fake: FakeServer) -> None:
    with httpx.Client(base_url=fake.url, timeout=300) as client:
        for _ in range(50):
            assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200
            assert client.get("/health").status_code == 200


def test_a_long_prompt_leaves_the_loop_free() -> None:
    """While megabytes are tokenised, /health still answers."""
    with FakeServer(config=ServerConfig(port=0, max_body=8 << 20)) as server:
        done = threading.Event()

        def ask() -> httpx.Response:
            try:
                messages = [{"role": "user", "content": "abc " * (1 << 18)}]
                return server.post("/v1/messages/count_tokens", messages=messages)
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(ask)
            num_answers = 0
            while not done.is_set():
                assert server.get("/health").status_code == 200
                num_answers += 1
            assert future.result().json()["input_tokens"] > 1 << 20
        assert num_answers >= 2


# ---- the end ----


@pytest.fixture
def slow_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine clients need longer to receive their last error."""
    monkeypatch.setattr(service, "FINAL_ERROR_SECONDS", 10.0)


def start(server: FakeServer, pool: ThreadPoolExecutor, count: int, **body: Any) -> list[Future[httpx.Response]]:
    futures = [pool.submit(server.post, CHAT, **(LONG | body)) for _ in range(count)]
    until(lambda: inside(server) == count)
    return futures


def test_draining_finishes_what_runs_and_refuses_the_rest(
    gated: FakeServer, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    asked_for = start(gated, threads, 5)
    gated.server.stop()
    until(lambda: gated.get("/ready").status_code == 503)
    assert "ending: 5 answers may take 30 s more; a second signal cuts them off" in caplog.text
    assert gated.get("/health").status_code == 200
    refused = gated.post(CHAT, messages=HELLO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers
    gated.runner.fuel.put(None)
    for each in asked_for:
        found = events(iter(each.result().text.splitlines()))
        assert "".join(c["delta"].get("content", "") for e in found for c in e["choices"]) == ANSWER
    gated.thread.join(300)
    assert gated.server.error is None


@pytest.mark.usefixtures("slow_clients")
def test_draining_ends_what_takes_too_long(threads: ThreadPoolExecutor) -> None:
    with FakeServer(GatedRunner(), ServerConfig(port=0, drain_seconds=0.2)) as server:
        streaming = start(server, threads, 1)
        whole = threads.submit(server.post, CHAT, **(LONG | {"stream": False}))
        until(lambda: inside(server) == 2)
        server.runner.fuel.put(1)  # a token each
        until(lambda: len(server.runner.plans) == 2)
        server.server.stop()
        until(lambda: server.get("/ready").status_code == 503)
        until(lambda: server.engine is not None and not server.engine._inbox.empty())
        server.runner.fuel.put(1)
        [answer] = [each.result() for each in streaming]
        assert answer.status_code == 200
        assert "shutting_down" in answer.text
        assert "[DONE]" not in answer.text
        assert whole.result().status_code == 503
    assert server.server.error is None


@pytest.mark.usefixtures("slow_clients")
def test_an_engine_failure_reaches_every_client(threads: ThreadPoolExecutor) -> None:
    with FakeServer(GatedRunner()) as server:
        going = start(server, threads, 1)
        server.runner.fuel.put(1)
        until(lambda: len(server.runner.plans) == 2)
        early = [threads.submit(server.post, CHAT, **(LONG | {"stream": streaming})) for streaming in (True, False)]
        anthropic = threads.submit(server.post, "/v1/messages", messages=HELLO, max_tokens=9)
        until(lambda: inside(server) == 4)
        server.runner.fuel.put(ValueError("secret at 0xdeadbeef in /home/x"))
        answers = [each.result() for each in (*going, *early, anthropic)]
        assert [answer.status_code for answer in answers] == [200, 500, 500, 500]
        assert "engine_failed" in answers[0].text
        assert answers[3].json()["error"]["type"] == "api_error"
        assert not any("0xdead" in answer.text or "/home" in answer.text for answer in answers)
        until(lambda: server.get("/health").status_code == 503)
        assert server.get("/ready").status_code == 503
        assert server.post(CHAT, messages=HELLO).status_code == 500
        server.thread.join(300)
        assert isinstance(server.server.error, ValueError)


@pytest.mark.usefixtures("little_room")
def test_an_answer_nobody_reads_does_not_keep_the_server_up() -> None:
    long = LONG | {"max_tokens": 14_000, "ignore_eos": True, "return_origins": True}
    config = ServerConfig(port=0, drain_seconds=0.2)
    runner = TrustingRunner(make_info(max_context=15_000, num_blocks=4096))
    with FakeServer(runner, config) as server, raw_post(server.port, CHAT, long, room=2048):
        until(lambda: server.finished("length") == 1)
        server.server.stop()
        server.thread.join(300)
        assert not server.thread.is_alive()


def test_complex_grammars_delay_no_other_request(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads for grammars; prompts and plain answers go on."""
    monkeypatch.setattr(compiler, "PAUSE_FACTOR", 0.0)  # it would only make the last of them wait
    monkeypatch.setattr(prepare, "GrammarCompiler", partial(GrammarCompiler, seconds=5.0))
    with FakeServer() as server:
        patterns = [f"(a{{9000}}){{{9000 - i}}}" for i in range(3)]
        hard = [threads.submit(server.post, CHAT, messages=HELLO, guided_regex=pattern) for pattern in patterns]
        for _ in range(5):
            assert server.post(CHAT, messages=HELLO, max_tokens=5).status_code == 200
        assert not all(each.done() for each in hard)
        for each in hard:
            refused = each.result()
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "guided_regex"
            assert "too complex" in refused.json()["error"]["message"]
        assert server.post(CHAT, messages=HELLO, max_tokens=5, guided_regex="a+").status_code == 200
