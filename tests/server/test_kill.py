"""Real processes that are killed in various ways: what their clients saw, and what was left."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest
from fake_server import ENGINE, until
from real_server import RealServer

from slipstream.cli import main
from slipstream.server.http.lifecycle import Server
from slipstream.server.service.settings import ServerConfig

SCRIPT = str(Path(__file__).parent / "faulty.py")
FAULTY = [sys.executable, "-c", f"import runpy; runpy.run_path({SCRIPT!r}, run_name='__main__')"]
SMALL = ("--draft", "2", "--max-context", "1024", "--max-streams", "2", "--queue-limit", "8")
LONG = {"messages": [{"role": "user", "content": "Count from one to one thousand."}], "ignore_eos": True, "seed": 3}
PARIS = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


class Reader:
    """A client in a thread of its own: the lines it received, and the error that ended it."""

    def __init__(self, server: RealServer, **body: Any) -> None:
        self.text = ""
        self.lines: list[str] = []
        self.status: int | None = None
        self.error: Exception | None = None
        self.first = threading.Event()
        self._url, self._body = f"{server.url}/v1/chat/completions", {**LONG, "stream": True, **body}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=300) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.lines.append(line)
                    if '"content":"' in line:
                        self.first.set()
        except httpx.HTTPError as error:
            self.error = error
        finally:
            self.first.set()

    def wait(self) -> Reader:
        self._thread.join(300)
        assert not self._thread.is_alive(), "a client was left waiting"
        return self

    @property
    def received(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def faulty() -> Iterator[RealServer]:
    with RealServer(*SMALL, command=[*FAULTY, "serve"]) as server:
        yield server


def test_an_exception_in_the_engine_thread(faulty: RealServer) -> None:
    """Two decode, three wait; all get the error, /health turns 503, the process ends with an error."""
    running = [Reader(faulty, max_tokens=900) for _ in range(2)]
    for reader in running:
        assert reader.first.wait(300)
    waiting = [Reader(faulty, max_tokens=900, stream=streaming) for streaming in (True, True, False)]
    until(lambda: faulty.status()["load"]["waiting"] == 3)
    faulty.signal(signal.SIGUSR1)
    for reader in (*running, *waiting):
        reader.wait()
        assert "the engine failed" in reader.received
        assert "0x7f00" not in reader.received
        assert "/dev" not in reader.received
        assert "[DONE]" not in reader.received
    assert [reader.status for reader in running] == [200, 200]
    assert [reader.status for reader in waiting] == [500, 500, 500]
    health = httpx.get(f"{faulty.url}/health", timeout=300)
    assert health.status_code == 503
    assert faulty.wait() == 1
    assert "injected: a lost device" in "\n".join(faulty.output), "the log has the cause"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{faulty.url}/health", timeout=300)


def test_sigterm_under_load() -> None:
    """What runs and what waits is finished; what comes is refused; the process ends well."""
    with RealServer(*SMALL, "--drain", "300") as server:
        alone = server.post("/v1/chat/completions", **LONG, max_tokens=40).json()["choices"][0]["message"]["content"]
        readers = [Reader(server, max_tokens=40) for _ in range(6)]
        assert readers[0].first.wait(300)
        until(lambda: taken(server) == 7)
        server.signal(signal.SIGTERM)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client:
            until(lambda: is_refused(client))
        assert server.wait() == 0
        for reader in readers:
            reader.wait()
            assert "[DONE]" in reader.received, (reader.status, reader.error, reader.received[-300:])
            assert text_of(reader) == alone


def test_sigterm_and_a_request_that_never_ends() -> None:
    with RealServer(*SMALL, "--drain", "0.5") as server:
        reader = Reader(server, max_tokens=1000)
        assert reader.first.wait(300)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "shutting_down" in reader.wait().received or "[DONE]" in reader.received


def test_sigterm_while_loading() -> None:
    with RealServer(loaded=False) as server:
        until(lambda: answers(server))
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_sigkill_and_restart() -> None:
    """Clients see a broken connection, not an answer that looks whole; the same port serves again at once."""
    with RealServer(*SMALL) as server:
        answer = server.post("/v1/chat/completions", **PARIS).json()["choices"][0]["message"]["content"]
        readers = [Reader(server, max_tokens=900) for _ in range(2)]
        for reader in readers:
            assert reader.first.wait(300)
        readers.append(Reader(server, max_tokens=900))
        until(lambda: server.status()["load"]["waiting"] == 1)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        for reader in readers:
            assert isinstance(reader.wait().error, httpx.TransportError)
            assert "[DONE]" not in reader.received
    with RealServer(*SMALL, port=server.port) as again:
        assert again.post("/v1/chat/completions", **PARIS).json()["choices"][0]["message"]["content"] == answer


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("slipstream: cannot listen on 127.0.0.1:")
    assert printed.count("\n") == 1


def test_a_model_that_cannot_be_loaded_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "/no/such/model.gguf"]) == 1
    assert "/no/such/model.gguf" in capsys.readouterr().err


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_panic_while_loading_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def load(on_death: object) -> NoReturn:
        raise Panic("in Rust")

    server = Server(ServerConfig(port=0), ENGINE, load)
    running = threading.Thread(target=server.run, daemon=True)
    running.start()
    running.join(300)
    assert not running.is_alive(), "it loads for ever"
    assert str(server.error) == "The model cannot be loaded: Panic: in Rust"


def text_of(reader: Reader) -> str:
    chunks = [json.loads(line[6:]) for line in reader.lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def taken(server: RealServer) -> int:
    """Requests the server has taken in since it started."""
    load = server.status()["load"]
    return int(load["running"] + load["waiting"] + sum(load["requests"].values()))


def is_refused(client: openai.OpenAI) -> bool:
    try:
        client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=LONG["messages"], max_tokens=1)
    except (openai.InternalServerError, openai.APIConnectionError):
        return True
    return False


def answers(server: RealServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=300).status_code == 200
    except httpx.ConnectError:
        return False
