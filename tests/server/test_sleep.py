"""`--sleep-idle`: the model's memory is freed after a time without requests, and the next request loads it again."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_server import END, ENGINE, FACTS, WAIT, FakeServer, asked, said, until
from fakes import FakeRunner, make_info
from real_server import RealServer
from test_engine import GatedRunner

from slipstream.engine.engine import Engine
from slipstream.errors import LoadError
from slipstream.server.service.model_holder import LoadedModel
from slipstream.server.service.settings import ServerConfig

HELLO = {"messages": [{"role": "user", "content": "hello"}], "seed": 5, "max_tokens": 12}
ANSWER = said(asked("hello"), 5, 12)


class SleepyServer(FakeServer):
    """Loads a new runner each time; every load but the first waits for the gate."""

    def __init__(self, keep_alive: float = 10.0) -> None:
        config = ServerConfig(port=0, sleep_idle_seconds=0.05, keep_alive_seconds=keep_alive, drain_seconds=WAIT)
        super().__init__(config=config)
        self.gate = threading.Event()
        self.failing: Exception | None = None
        self.num_loads = 0
        self.runners: list[weakref.ref[FakeRunner]] = []
        self.num_released = 0

    def _load(self, on_death: Callable[[Exception], None]) -> LoadedModel:
        if self.num_loads:
            assert self.gate.wait(WAIT)
        self.num_loads += 1
        if self.failing is not None:
            raise self.failing
        self.engine = Engine(self._make_runner, ENGINE, (END,), on_death)
        return LoadedModel(self.engine, self.tokenizer, FACTS, self._release)

    def _make_runner(self) -> FakeRunner:
        runner = FakeRunner(make_info(), hit=0.7)
        self.runners.append(weakref.ref(runner))
        return runner

    def _release(self) -> None:
        self.num_released += 1

    def state(self) -> str:
        return str(self.get("/v1/status").json()["state"])

    def sleep(self) -> None:
        until(lambda: self.state() == "sleeping")
        until(lambda: self.engine is not None and not self.engine.alive)


@pytest.fixture
def sleepy() -> Iterator[SleepyServer]:
    with SleepyServer() as server:
        yield server
        server.gate.set()


def answer(server: FakeServer) -> str:
    return str(server.post("/v1/chat/completions", **HELLO).json()["choices"][0]["message"]["content"])


def test_asleep_it_answers_what_needs_no_model(sleepy: SleepyServer) -> None:
    sleepy.sleep()
    assert sleepy.get("/health").status_code == 200
    ready = sleepy.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "sleeping"})
    assert sleepy.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert sleepy.post("/tokenize", prompt="abc").json()["count"] == 3
    assert "slipstream_ready 1.0" in sleepy.get("/metrics").text
    memory = sleepy.get("/v1/status").json()["memory"]
    assert memory["weight_bytes"] == memory["kv_bytes"] == 0
    assert sleepy.num_loads == 1


def test_nothing_holds_the_runner_of_a_model_that_sleeps(sleepy: SleepyServer) -> None:
    sleepy.sleep()
    until(lambda: sleepy.num_released == 1)
    gc.collect()
    assert [each() for each in sleepy.runners] == [None]


def test_several_requests_wake_it_once(sleepy: SleepyServer) -> None:
    sleepy.sleep()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(answer, sleepy) for _ in range(4)]
        until(lambda: sleepy.state() == "waking")
        assert sleepy.get("/ready").status_code == 200
        sleepy.gate.set()
        assert [each.result(WAIT) for each in waiting] == [ANSWER] * 4
    assert sleepy.num_loads == 2
    sleepy.sleep()
    assert answer(sleepy) == ANSWER
    assert sleepy.num_loads == 3


def test_a_stream_gets_keep_alives_while_the_model_loads() -> None:
    with SleepyServer(keep_alive=0.02) as sleepy:
        sleepy.sleep()
        body = {**HELLO, "stream": True}
        with httpx.stream("POST", f"{sleepy.url}/v1/chat/completions", json=body, timeout=WAIT) as response:
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            assert sleepy.num_loads == 1
            sleepy.gate.set()
            rest = list(lines)
        assert "data: [DONE]" in rest


def test_a_client_that_leaves_does_not_stop_the_loading(sleepy: SleepyServer) -> None:
    sleepy.sleep()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{sleepy.url}/v1/chat/completions", json=HELLO, timeout=0.2)
    sleepy.gate.set()
    until(lambda: sleepy.num_loads == 2)
    assert answer(sleepy) == ANSWER


def test_a_model_that_cannot_be_loaded_again_is_tried_again(sleepy: SleepyServer) -> None:
    sleepy.sleep()
    sleepy.gate.set()
    sleepy.failing = LoadError("no memory is left")
    refused = sleepy.post("/v1/chat/completions", **HELLO)
    assert refused.status_code == 503
    assert "no memory is left" in refused.json()["error"]["message"]
    assert sleepy.state() == "sleeping"
    sleepy.failing = None
    assert answer(sleepy) == ANSWER


def test_it_is_not_freed_while_a_request_runs() -> None:
    runner = GatedRunner()
    server = FakeServer(runner, ServerConfig(port=0, sleep_idle_seconds=0.2))
    with ThreadPoolExecutor() as threads, server:
        running = threads.submit(answer, server)
        runner.fuel.put(1)
        until(lambda: server.get("/v1/status").json()["load"]["running"] == 1)
        time.sleep(0.5)
        assert server.get("/ready").json() == {"status": "ready"}
        runner.fuel.put(None)
        assert running.result(WAIT) == ANSWER
        until(lambda: bool(server.get("/ready").json() == {"status": "sleeping"}))


def test_a_sleeping_server_shuts_down() -> None:
    with SleepyServer() as sleepy:
        sleepy.sleep()
    assert sleepy.server.error is None


def children(pid: int) -> list[str]:
    return sorted(child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what a process holds")
def test_the_memory_of_a_real_model_goes_back_to_the_system() -> None:
    paris = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    with RealServer("--draft", "2", "--kv-memory", "300MB", "--sleep-idle", "0.5") as server:

        def resident() -> int:
            return int(server.status()["memory"]["rss_bytes"])

        def text() -> str:
            return str(server.post("/v1/chat/completions", **paris).json()["choices"][0]["message"]["content"])

        before = text()
        taken, processes = resident(), children(server.process.pid)
        until(lambda: server.status()["state"] == "sleeping")
        until(lambda: resident() < taken - 300_000_000)  # KV, and most of 110 MB of weights
        assert text() == before
        assert children(server.process.pid) == processes, "a second model's helpers"
