"""Clusters for the tests, each with ports of its own, and clients that stream from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from free_ports import free_port

DRIVER = Path(__file__).parent / "cluster_driver.py"
WAIT = 300.0
MODEL = ("max_context=1024", "max_streams=8", "cpus_per_replica=1", "draft=2")


def own_places(folder: str) -> dict[str, str]:
    """Ray's HAProxy has fixed ports, and a folder names the cluster that others join: others for each cluster.

    ``folder``: with a short path, since sockets lie in it.
    """
    names = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT", "FALLBACK_PROXY_GRPC_PORT")
    return {"RAY_TMPDIR": folder, **{f"RAY_SERVE_{name}": str(free_port()) for name in names}}


class RayCluster:
    """``command``: what starts it; the driver of the tests if it is left out."""

    def __init__(self, *settings: str, command: list[str] | None = None, ready: str = "^ready$") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
        self.fault = Path(self._folder.name) / "fault"
        launch = command or [sys.executable, str(DRIVER), str(self.fault), *MODEL]
        self.process = subprocess.Popen(
            [*launch, f"port={self.port}", *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own_places(self._folder.name), "PYTHONUNBUFFERED": "1"},
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait_for(ready)
        except AssertionError:
            self.process.kill()
            self.end()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))

    def wait_for(self, pattern: str, count: int = 1) -> None:
        end = time.monotonic() + WAIT
        while sum(bool(re.search(pattern, line)) for line in list(self.output)) < count:
            assert self.process.poll() is None, "\n".join(self.output)
            assert time.monotonic() < end, "\n".join(self.output)
            time.sleep(0.05)

    def scale(self, count: int) -> None:
        """Returns when Ray has taken it; replicas come and go afterwards."""
        before = sum(line == "scaled" for line in self.output)
        assert self.process.stdin is not None
        self.process.stdin.write(f"scale {count}\n")
        self.process.stdin.flush()
        self.wait_for("^scaled$", before + 1)

    def replicas(self) -> set[str]:
        """Those that report metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT).text
        return set(re.findall(r'^slipstream_ready{replica="(\w+)"} 1', text, re.MULTILINE))

    def wait_for_replicas(self, count: int, right: Callable[[set[str]], bool] = bool) -> set[str]:
        end = time.monotonic() + WAIT
        while True:
            with contextlib.suppress(httpx.HTTPError):
                found = self.replicas()
                if len(found) == count and right(found):
                    return found
            assert time.monotonic() < end, "\n".join(self.output[-50:])
            time.sleep(0.2)

    def wait_for_replaced(self, before: set[str], count: int) -> None:
        """As many replicas as before, of which so many are new."""
        self.wait_for_replicas(len(before), lambda found: len(before - found) == count)

    def running_by_replica(self) -> list[int]:
        """Streams of each replica that answers."""
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT).text
        return [int(float(found)) for found in re.findall(r"^vllm:num_requests_running{.*} (\S+)$", text, re.MULTILINE)]

    def replica_pids(self) -> list[int]:
        """By the titles that Ray gives its processes, of those that descend from this cluster."""
        parents = {int(pid): int(parent) for pid, parent in _processes()}
        named = [pid for pid in parents if _title(pid).startswith("ray::ServeReplica:slipstream:slipstream")]
        return [pid for pid in named if self.process.pid in _ancestors(pid, parents)]

    def end(self) -> int:
        """Drains, as at the end of the driver's input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(WAIT)
        self._reader.join(WAIT)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._folder.cleanup()
        return code

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.end()


def _processes() -> list[tuple[str, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((folder.name, (folder / "stat").read_text().rpartition(")")[2].split()[1]))
    return found


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


@dataclass
class Answer:
    """What a client got. ``error``: why it has no whole answer; a client may ask again."""

    text: str = ""
    replica: str = ""
    num_chunks: int = 0
    whole: bool = False
    left: bool = False
    error: str = ""


def question(index: int, max_tokens: int = 160) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Tell me a story about the number {index}."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def ask(
    url: str, body: dict[str, Any], leave_after: int | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """``leave_after``: chunks, then the client is gone. Every other end of the stream than its own is an error."""
    answer = Answer()
    try:
        async with (
            httpx.AsyncClient(timeout=WAIT) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            answer.replica = response.headers.get("x-slipstream-replica", "")
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
                return answer
            async for line in response.aiter_lines():
                if _take(answer, line) or (leave_after is not None and answer.num_chunks >= leave_after):
                    answer.left = not answer.whole
                    return answer
            answer.error = answer.error or "the stream ended early"
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def _take(answer: Answer, line: str) -> bool:
    """True: it was the last one."""
    if line == "data: [DONE]":
        answer.whole = not answer.error
    elif line.startswith("data: "):
        event = json.loads(line.removeprefix("data: "))
        answer.error = json.dumps(event["error"]) if "error" in event else answer.error
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
        answer.num_chunks += 1
    return answer.whole or bool(answer.error)


async def ask_until_whole(
    url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[Answer, list[str]]:
    """As a client that tries again after an error, with what it was told before."""
    errors: list[str] = []
    while not (answer := await ask(url, body, headers=headers)).whole:
        errors.append(answer.error)
        assert len(errors) < 100, errors
        await asyncio.sleep(0.5)
    return answer, errors
