"""Streams from a paced server, directly or through others: when each chunk was written and when it came.

Bare sockets in one loop: a chunk's arrival is noted as it is read, all else is done afterwards. Both times are of the
machine's monotonic clock, so client and server must run on the same one.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from slipstream.errors import ConfigError

SILENT_SECONDS = 60.0  # after which streams are given up
STAMP = re.compile(rb"<(\d+)>")

Piece = tuple[int, bytes]  # what was read, and when


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Of one stream, in nanoseconds."""

    sent: int
    status: int  # of HTTP; 0: no answer
    written: tuple[int, ...]  # [chunks]
    arrived: tuple[int, ...]  # [chunks]

    @property
    def delays(self) -> list[int]:
        return [arrived - written for written, arrived in zip(self.written, self.arrived, strict=True)]


def stream_all(urls: Sequence[str], count: int, num_tokens: int, api_key: str | None = None) -> list[StreamTimes]:
    """``count`` streams at once, spread over the addresses."""
    connections = [_connect(urls[i % len(urls)]) for i in range(count)]
    requests = [_request(urls[i % len(urls)], i, num_tokens, api_key) for i in range(count)]
    sent = []
    for connection, request in zip(connections, requests):
        sent.append(time.monotonic_ns())
        connection.sendall(request)
    return [read_times(*each) for each in zip(sent, _read_all(connections))]


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    try:
        return socket.create_connection((parts.hostname, parts.port or 80), SILENT_SECONDS)
    except OSError as error:
        raise ConfigError(f"{url} does not answer: {error.strerror or error}") from error


def _request(url: str, index: int, num_tokens: int, api_key: str | None) -> bytes:
    """Every stream is a conversation of its own, for routers that look at its header or its first message."""
    parts = urlsplit(url)
    body = {
        "model": "paced",
        "messages": [{"role": "user", "content": f"Stream {index}: what time is it?"}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = [
        f"POST {parts.path.rstrip('/')}/v1/chat/completions HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        f"x-session-id: stream-{index}",
        "Connection: close",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def _read_all(connections: Sequence[socket.socket]) -> list[list[Piece]]:
    """Until all are closed, or none has said anything for too long."""
    pieces: list[list[Piece]] = [[] for _ in connections]
    with selectors.DefaultSelector() as selector:
        for connection, mine in zip(connections, pieces):
            selector.register(connection, selectors.EVENT_READ, mine)
        while selector.get_map() and (ready := selector.select(SILENT_SECONDS)):
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                if not _read(key.fileobj, key.data):
                    selector.unregister(key.fileobj)
    for connection in connections:
        connection.close()
    return pieces


def _read(connection: socket.socket, pieces: list[Piece]) -> bool:
    """Whether more may come."""
    try:
        data = connection.recv(65536)
    except OSError:
        return False
    pieces.append((time.monotonic_ns(), data))
    return bool(data)


class _Body:
    """Takes the body out of a response's bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self.data += body

    def feed(self, data: bytes) -> None:
        self.parser.feed_data(data)


def read_times(sent: int, pieces: Iterable[Piece]) -> StreamTimes:
    body = _Body()
    written: list[int] = []
    arrived: list[int] = []
    try:
        for at, data in pieces:
            body.feed(data)
            end = 0
            for found in STAMP.finditer(body.data):
                written.append(int(found[1]))
                arrived.append(at)
                end = found.end()
            body.data = body.data[end:]
        status = int(body.parser.get_status_code())
    except httptools.HttpParserError:
        status = 0
    return StreamTimes(sent, status, tuple(written), tuple(arrived))
