"""Two hundred clients at once, a third of which do not behave. Also a command: `python tests/server/load.py`.

Each client asks for a seeded, sampled text that was asked for alone before, so every text is known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from real_server import RealServer

ARGUMENTS = ("--draft", "2", "--max-context", "512", "--max-streams", "16", "--queue-limit", "256")
STARTS = ("Once upon a time", "The sea is", "def main():", "In the year 1900,", "My favourite food", "To be or not")
NUM_CLIENTS = 200
NUM_SLOW = 8
SLOW_SECONDS = 5
WAIT = 300.0
LOCAL = "127.0.0.1"


@dataclass
class Seen:
    """What became of the clients of some rounds."""

    stayed: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)  # (got, expected)
    left: int = 0
    left_in_body: int = 0
    resident: list[int] = field(default_factory=list)  # bytes after each round
    used_blocks: list[int] = field(default_factory=list)


def requests() -> list[dict[str, Any]]:
    """Twelve different ones: sampled and greedy, drafting and not, of different lengths."""
    return [
        {
            "prompt": start,
            "temperature": 0.0 if seed else 0.9,
            "seed": seed,
            "max_tokens": 8 + 4 * i,
            "ignore_eos": True,
            "stream": True,
            "speculative": {"enabled": i % 3 != 0},
        }
        for i, start in enumerate(STARTS)
        for seed in (0, 1)
    ]


def as_http(body: dict[str, Any]) -> tuple[bytes, bytes]:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode(), data


def text_in(answer: bytes) -> str:
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    assert b"[DONE]" in answer, answer[-300:]
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def stay(port: int, body: dict[str, Any], slow: bool = False) -> str:
    return text_in(await answer_to(port, body, slow))


async def answer_to(port: int, body: dict[str, Any], slow: bool = False, source: str = LOCAL) -> bytes:
    """``source``: the address that the request comes from."""
    reader, writer = await asyncio.open_connection(LOCAL, port, local_addr=(source, 0))
    head, data = as_http(body)
    writer.write(head + data)
    answer = b""
    for _ in range(SLOW_SECONDS if slow else 0):
        answer += await reader.read(1)
        await asyncio.sleep(1.0)
    answer += await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def leave(port: int, body: dict[str, Any], rng: random.Random, in_body: bool, source: str = LOCAL) -> None:
    """Goes at a random moment: in the body, in the queue, in the prompt, between two tokens."""
    reader, writer = await asyncio.open_connection(LOCAL, port, local_addr=(source, 0))
    head, data = as_http(body)
    writer.write(head + (data[: rng.randrange(len(data))] if in_body else data))
    await writer.drain()
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * 5.0)
    else:
        await reader.read(rng.randrange(1, 600))
    writer.transport.abort()


async def one_round(port: int, known: list[tuple[dict[str, Any], str]], rng: random.Random, seen: Seen) -> None:
    async def staying(index: int, slow: bool) -> None:
        body, expected = known[index]
        got = await stay(port, body, slow)
        seen.stayed += 1
        if got != expected:
            seen.wrong.append((got, expected))

    async def leaving(index: int, in_body: bool) -> None:
        seen.left += 1
        seen.left_in_body += in_body
        await leave(port, known[index][0], rng, in_body)

    num_leaving = NUM_CLIENTS // 3
    clients = [leaving(rng.randrange(len(known)), i % 4 == 0) for i in range(num_leaving)]
    clients += [staying(rng.randrange(len(known)), i < NUM_SLOW) for i in range(NUM_CLIENTS - num_leaving)]
    rng.shuffle(clients)
    await asyncio.wait_for(asyncio.gather(*clients), WAIT)


async def until_idle(server: RealServer) -> dict[str, Any]:
    for _ in range(int(WAIT * 10)):
        status = await asyncio.to_thread(server.status)
        if status["load"]["running"] == status["load"]["waiting"] == 0:
            return status
        await asyncio.sleep(0.1)
    raise AssertionError("the server did not come to rest")


async def rounds(server: RealServer, count: int, seed: int = 1) -> Seen:
    known = [(body, await stay(server.port, body)) for body in requests()]
    rng, seen = random.Random(seed), Seen()
    for _ in range(count):
        await one_round(server.port, known, rng, seen)
        memory = (await until_idle(server))["memory"]
        seen.resident.append(memory["rss_bytes"])
        seen.used_blocks.append(memory["kv_blocks_used"])
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    count = parser.parse_args().rounds
    with RealServer(*ARGUMENTS) as server:
        seen = asyncio.run(rounds(server, count))
        requests_ended = server.status()["load"]["requests"]
    print(
        f"{seen.stayed} stayed, {len(seen.wrong)} got a wrong text; {seen.left} left, {seen.left_in_body} in their body"
    )
    print(f"engine: {requests_ended}; KV blocks in use after each round: {seen.used_blocks}")
    print("resident MB after each round:", [round(each / 1e6, 1) for each in seen.resident])
    grown = seen.resident[-1] / seen.resident[min(1, count - 1)] - 1.0
    print(f"from the second to the last: {100 * grown:+.2f} %")
    return 1 if seen.wrong or any(seen.used_blocks) or abs(grown) >= 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
