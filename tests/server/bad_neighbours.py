"""A hundred clients, each with an address of its own: a third leave, one more has sent 300 requests before them, twenty
others never read their answers. Also a command: `python tests/server/bad_neighbours.py`.

Needs Linux, where every address of 127.0.0.0/8 is this machine.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from load import LOCAL, WAIT, answer_to, as_http, leave, requests, stay, text_in, until_idle
from real_server import RealServer

ARGUMENTS = ("--shape", "tiny", "--random-weights", "--dtype", "int8", "--draft", "2", "--max-context", "1024")
NUM_CLIENTS = 100
NUM_HOSTILE = 300  # requests of one client
NUM_NEVER_READ = 20
HOSTILE = "127.0.0.2"
LONG = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}
UNREAD = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "echo": True, "stream": True}


@dataclass
class Neighbourhood:
    """What became of everybody."""

    right: int = 0
    refused: int = 0  # others than the hostile one
    wrong: list[tuple[str, str]] = field(default_factory=list)  # (got, expected)
    left: int = 0
    waited: list[float] = field(default_factory=list)  # seconds of each client that stayed
    hostile: dict[str, int] = field(default_factory=dict)  # answers to the hostile client, by status
    hostile_done_first: int = 0  # its answers that were whole before the last of the others
    used_blocks: int = 0


def address(index: int) -> str:
    return f"127.0.1.{1 + index}"


def status_of(answer: bytes) -> str:
    return answer.split()[1].decode()


def never_read(port: int, index: int) -> socket.socket:
    """Asks for a long answer and leaves it with the server: the system keeps little of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.bind((f"127.0.2.{1 + index}", 0))
    connection.connect((LOCAL, port))
    connection.sendall(b"".join(as_http(UNREAD)))
    return connection


async def hostile_request(port: int, seen: Neighbourhood) -> None:
    status = status_of(await answer_to(port, LONG, source=HOSTILE))
    seen.hostile[status] = seen.hostile.get(status, 0) + 1


async def one_client(
    port: int, index: int, known: list[tuple[dict[str, Any], str]], rng: random.Random, seen: Neighbourhood
) -> None:
    body, expected = known[index % len(known)]
    if index % 3 == 0:
        seen.left += 1
        await leave(port, body, rng, in_body=index % 4 == 0, source=address(index))
        return
    began = time.monotonic()
    answer = await answer_to(port, body, source=address(index))
    if status_of(answer) != "200":
        seen.refused += 1
        return
    seen.waited.append(time.monotonic() - began)
    seen.hostile_done_first = seen.hostile.get("200", 0)
    if (got := text_in(answer)) == expected:
        seen.right += 1
    else:
        seen.wrong.append((got, expected))


async def neighbourhood(server: RealServer, seed: int = 1) -> Neighbourhood:
    known = [(body, await stay(server.port, body)) for body in requests()]
    seen, rng = Neighbourhood(), random.Random(seed)
    never = [never_read(server.port, index) for index in range(NUM_NEVER_READ)]
    hostile = [asyncio.create_task(hostile_request(server.port, seen)) for _ in range(NUM_HOSTILE)]
    await _until_it_fills_the_queue(server)
    clients = (one_client(server.port, index, known, rng, seen) for index in range(NUM_CLIENTS))
    await asyncio.wait_for(asyncio.gather(*clients), WAIT)
    await asyncio.wait_for(asyncio.gather(*hostile), WAIT)
    for connection in never:
        connection.close()
    seen.used_blocks = (await until_idle(server))["memory"]["kv_blocks_used"]
    return seen


async def _until_it_fills_the_queue(server: RealServer) -> None:
    """Until as many requests wait as will, for a while: the server may let one client have a share only."""
    most, since = -1, time.monotonic()
    while time.monotonic() < since + 0.3:
        waiting = (await asyncio.to_thread(server.status))["load"]["waiting"]
        if waiting > most:
            most, since = waiting, time.monotonic()
        await asyncio.sleep(0.05)


def main() -> int:
    with RealServer(*ARGUMENTS) as server:
        seen = asyncio.run(neighbourhood(server))
    stayed = f"{seen.right} have their own text, {len(seen.wrong)} another one, {seen.refused} were refused"
    print(f"{stayed}; {seen.left} left")
    print(f"they had it after {max(seen.waited, default=0.0):.1f} s at most")
    print(f"the hostile client: {seen.hostile}; {seen.hostile_done_first} answers before the last of the others")
    return 1 if seen.wrong or seen.refused else 0


if __name__ == "__main__":
    sys.exit(main())
