"""nginx and HAProxy with the configuration files that are shipped: only addresses are replaced.

Behind them two servers whose model answers at a fixed pace; its name tells who answered.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port
from real_server import WAIT, RealServer

DEPLOY = Path(__file__).parents[2] / "deploy"
PACED = [sys.executable, "-m", "slipstream.bench.hops.paced_model"]
KINDS = ("nginx", "haproxy")
PACKAGES = {"nginx": "nginx-light", "haproxy": "haproxy"}


def until(what: Callable[[], bool], seconds: float = WAIT) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


def paced_server(name: str, port: int, *arguments: str) -> RealServer:
    """``port``: 0: any."""
    return RealServer("--name", name, *arguments, port=port, command=PACED)


def need(kind: str) -> str:
    program = shutil.which(kind, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip(f"needs {kind} on the PATH: Debian's package {PACKAGES[kind]}")
    return program


class Router:
    """A router on a port of its own, in front of two ports."""

    def __init__(self, kind: str, folder: Path, ports: list[int]) -> None:
        program = need(kind)
        self.port = free_port()
        self._addresses = {8080: self.port, 8001: ports[0], 8002: ports[1]}
        for path in (DEPLOY / kind).iterdir():
            (folder / path.name).write_text(self._with_addresses(path.read_text()))
        start = {
            "nginx": ["-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"],
            "haproxy": ["-f", str(folder / "haproxy.cfg")],
        }
        self.log = (folder / "log").open("w+")
        self._process = subprocess.Popen([program, *start[kind]], stderr=self.log, stdout=self.log)
        until(self._listens)

    def _with_addresses(self, text: str) -> str:
        return re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{self._addresses[int(found[1])]}", text)

    def _listens(self) -> bool:
        assert self._process.poll() is None, Path(self.log.name).read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT)
        self.log.close()


@contextmanager
def routing(kind: str, folder: Path, ports: list[int]) -> Iterator[Router]:
    router = Router(kind, folder, ports)
    try:
        yield router
    finally:
        router.close()


class Routed:
    """Two paced servers, named one and two, and a router in front of them."""

    def __init__(self, kind: str, folder: Path, *arguments: str, headers: dict[str, str] | None = None) -> None:
        self.kind = kind
        need(kind)
        self._ports = {"one": 0, "two": 0}  # any, and then always the same
        self._arguments = arguments
        self.servers: dict[str, RealServer] = {}
        for name in self._ports:
            self.start(name)
        self.router = Router(kind, folder, list(self._ports.values()))
        # A router that met a closed port leaves it alone for a while. Where a session goes is a matter of chance: each
        # time others ask, since sixteen of one kind may all belong to one server.
        sessions = ({**(headers or {}), "x-session-id": f"start {i}"} for i in itertools.count())
        try:
            until(lambda: {self.ask(session) for session in itertools.islice(sessions, 16)} == {"one", "two"})
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> None:
        self.servers[name] = paced_server(name, self._ports[name], *self._arguments)
        self._ports[name] = self.servers[name].port

    def close(self) -> None:
        self.router.close()
        for server in self.servers.values():
            server.__exit__(None, None, None)

    def post(self, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions", **body: Any) -> Any:
        body = {
            "max_tokens": 1,
            "max_output_tokens": 1,
            **({} if "prompt" in body or "input" in body else {"messages": chat("Hi")}),
            **body,
        }
        sent = {"Content-Type": "application/json", **(headers or {})}
        return httpx.post(self.router.url + path, content=json.dumps(body), headers=sent, timeout=WAIT)

    def ask(self, headers: dict[str, str] | None = None, **body: Any) -> str:
        """Who answered."""
        answer = self.post(headers, **body)
        return str(answer.json()["model"]) if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"

    def session_on(self, name: str) -> dict[str, str]:
        """A header whose conversations go there."""
        found = ({"x-session-id": f"session {i}"} for i in range(64))
        return next(headers for headers in found if self.ask(headers) == name)

    def requests(self, name: str) -> dict[str, int]:
        """How many requests ended there, by reason."""
        return dict(self.servers[name].status()["load"]["requests"])

    def running(self, name: str) -> int:
        return int(self.servers[name].status()["load"]["running"])


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
