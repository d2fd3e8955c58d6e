"""The client of `slipstream bench http`: bare sockets, so that little of what is measured is its own.

It sleeps until an answer is whole, as one on another machine would be no load to this one: the kernel takes what the
server writes, event by event, and wakes no reader before the server has closed the connection.

Reads {"prompts", "max_tokens"} from its input, streams all of them at once from the port it is given, and writes
[seconds, tokens]: from the first byte sent to the last one read.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

WAKE_BYTES = 1 << 20  # bytes that must have come before a reader is woken; the end wakes it in any case


def main() -> None:
    request = json.loads(sys.stdin.read())
    connections = [_connect(int(sys.argv[1])) for _ in request["prompts"]]
    bodies = [_request(prompt, request["max_tokens"]) for prompt in request["prompts"]]
    began = time.perf_counter()
    for connection, body in zip(connections, bodies):
        connection.sendall(body)
    answers = _read_all(connections)
    seconds = time.perf_counter() - began
    print(json.dumps([seconds, sum(map(_num_tokens, answers))]))


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_BYTES)
    return connection


def _request(prompt: str, max_tokens: int) -> bytes:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _read_all(connections: list[socket.socket]) -> list[bytes]:
    selector = selectors.DefaultSelector()
    parts: list[list[bytes]] = [[] for _ in connections]
    for connection, mine in zip(connections, parts):
        selector.register(connection, selectors.EVENT_READ, mine)
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(65536)
            key.data.append(data)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return [b"".join(mine) for mine in parts]


def _num_tokens(answer: bytes) -> int:
    """As the server counts them."""
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {") and b'"usage"' in line]
    return int(json.loads(lines[-1][6:])["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
