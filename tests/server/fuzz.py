"""Thousands of hostile bodies, and what became of the server. Also a command: `python tests/server/fuzz.py`.

`/health` is asked all the time; memory is compared with that after a smaller first round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import httpx
from fuzz_bodies import Fuzzed, fuzzed, large_bodies
from real_server import RealServer
from schema_bodies import schema_bodies
from tiny_chat_model import write_tiny_chat_model

ARGUMENTS = ("--max-context", "2048", "--kv-memory", "64M", "--max-streams", "8")
CLIENTS = 8  # at once
WAIT = 300.0
WARM_BODIES = 300


@dataclass
class FuzzReport:
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, bytes]] = field(default_factory=list)  # status, path, the body's beginning
    slowest: tuple[float, str, bytes] = (0.0, "", b"")  # answer: seconds, path, the body's beginning
    health: list[float] = field(default_factory=list)  # seconds of each answer
    rss: tuple[int, int] = (0, 0)  # bytes before and after

    @property
    def grown(self) -> float:
        return self.rss[1] / self.rss[0] - 1.0


def as_http(body: Fuzzed) -> bytes:
    headers = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(body.data)), **body.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {body.path} HTTP/1.1\r\n{head}\r\n".encode() + body.data


async def send(port: int, body: Fuzzed, report: FuzzReport) -> None:
    began = time.monotonic()
    status = await asyncio.wait_for(_answer(port, body), WAIT)
    seconds = time.monotonic() - began
    report.statuses[status] += 1
    report.slowest = max(report.slowest, (seconds, body.path, body.data[:100]))
    if not "200" <= status < "500":
        report.failures.append((status, body.path, body.data[:300]))


async def _answer(port: int, body: Fuzzed) -> str:
    """Its status. A body over the limit may be refused before it was sent whole: then the connection breaks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(as_http(body))
        while read := await reader.read(1 << 16):
            answer += read
    except ConnectionError:
        answer = answer or b"- 413"
    finally:
        writer.close()
    return answer.split()[1].decode() if answer else "nothing"


async def send_all(port: int, bodies: Iterable[Fuzzed], report: FuzzReport) -> None:
    left = iter(bodies)

    async def client() -> None:
        for body in left:
            await send(port, body, report)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


@contextmanager
def watching_health(port: int, report: FuzzReport) -> Iterator[None]:
    watch = [sys.executable, str(Path(__file__).parent / "health_watch.py"), str(port)]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield
        output, _ = process.communicate()
    report.health = json.loads(output)


@contextmanager
def fuzzed_server() -> Iterator[RealServer]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_chat_model(Path(folder))
        with RealServer(str(model), *ARGUMENTS) as server:
            yield server


def fuzz(server: RealServer, count: int, seed: int = 1) -> FuzzReport:
    """``count`` bodies, a fifth of them from the server's schema, after a first round with some of each kind."""
    report, num_large = FuzzReport(), len(list(large_bodies()))
    first = [*fuzzed(WARM_BODIES, seed + 1, 0), *large_bodies()]
    asyncio.run(send_all(server.port, first, FuzzReport()))
    before = _resting_rss(server)
    described = schema_bodies(httpx.get(f"{server.url}/openapi.json", timeout=WAIT).json(), count // 5)
    mutated = fuzzed(count - len(described), seed, min(num_large, count // 10))
    with watching_health(server.port, report):
        asyncio.run(send_all(server.port, chain(described, mutated), report))
    report.rss = (before, _resting_rss(server))
    return report


def _resting_rss(server: RealServer) -> int:
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        status = server.status()
        if status["load"]["running"] == status["load"]["waiting"] == 0:
            return int(status["memory"]["rss_bytes"])
        time.sleep(0.1)
    raise AssertionError("the server did not come to rest")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.monotonic()
    with fuzzed_server() as server:
        report = fuzz(server, args.bodies, args.seed)
    print(f"{sum(report.statuses.values())} bodies in {time.monotonic() - began:.0f} s: {dict(report.statuses)}")
    for status, path, data in report.failures[:20]:
        print(f"{status} {path} {data!r}")
    print(f"slowest answer {report.slowest[0]:.2f} s: {report.slowest[1]} {report.slowest[2]!r}")
    print(f"/health: {len(report.health)} answers, the slowest after {max(report.health):.3f} s")
    print(f"resident MB {report.rss[0] / 1e6:.0f} -> {report.rss[1] / 1e6:.0f} ({100 * report.grown:+.1f} %)")
    return 1 if report.failures or max(report.health) >= 0.5 or report.grown >= 0.1 else 0


if __name__ == "__main__":
    sys.exit(main())
