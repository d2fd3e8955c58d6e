"""`slipstream bench hops`: what it measures is what a proxy adds, whatever the proxy makes of the bytes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from real_server import RealServer
from routers import paced_server

from slipstream.bench.hops.stamp_client import read_times, stream_all
from slipstream.cli import main

DELAY = 0.1  # seconds


@pytest.fixture(scope="module")
def paced() -> Iterator[RealServer]:
    with paced_server("paced", 0, "--pace", "50") as server:
        yield server


@contextmanager
def slow_proxy(port: int) -> Iterator[str]:
    """Passes on what comes, from the server later, and a few bytes at a time."""

    def late(source: socket.socket, target: socket.socket) -> None:
        with source, target:
            while data := source.recv(65536):
                time.sleep(DELAY)
                for start in range(0, len(data), 7):
                    target.sendall(data[start : start + 7])

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            server.sendall(client.recv(65536))
            threading.Thread(target=late, args=(server, client), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def bench(capsys: pytest.CaptureFixture[str], targets: str, *arguments: str) -> dict[str, Any]:
    small = ["--streams", "1,3", "--tokens", "4", "--repeats", "1"]
    assert main(["bench", "hops", "--target", targets, *small, *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_what_a_proxy_adds(paced: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    with slow_proxy(paced.port) as proxy:
        found = bench(capsys, f"direct={paced.url}+{paced.url},slow={proxy}")["results"]
    assert [(each["target"], each["streams"]) for each in found] == [
        ("direct", 1),
        ("slow", 1),
        ("direct", 3),
        ("slow", 3),
    ]
    for each in found:
        assert each["failed"] == 0
        assert 0 < each["chunk_p50"] <= each["chunk_p99"]
        assert 0 < each["first_p50"] <= each["first_p99"]
    for each in found[1::2]:
        assert each["chunk_p50"] >= 1e3 * DELAY
        assert each["first_p50"] >= 1e3 * DELAY


def test_the_pace(paced: RealServer) -> None:
    """Never faster than asked; a stream that joins may give the others one token early."""
    [stream] = stream_all([paced.url], 1, 10)
    assert stream.status == 200
    assert len(stream.written) == 10
    gaps = [after - before for before, after in pairwise(stream.written)]
    assert sum(gaps[1:]) >= 0.02e9 * (len(gaps) - 2)
    assert all(delay > 0 for delay in stream.delays)


def test_stamps_in_pieces() -> None:
    """A stamp counts when its last byte has come, wherever the bytes or the chunks of HTTP are cut."""
    body = b"7\r\n<1>x<22\r\n4\r\n2>-<\r\n2\r\n3>\r\n0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [(at, (head + body)[at : at + 1]) for at in range(len(head + body))]
    found = read_times(5, pieces)
    ends = [len(head) + body.index(end) + 1 for end in (b">x", b">-", b">\r\n0")]
    assert (found.sent, found.status, found.written) == (5, 200, (1, 222, 3))
    assert found.arrived == tuple(end - 1 for end in ends)


def test_a_target_that_is_no_paced_server(paced: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hops", "--target", f"x={paced.url}/nowhere", "--streams", "1"]) == 1
    assert "x: no stream was answered (HTTP 404)" in capsys.readouterr().err
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["bench", "hops", "--target", f"x={closed}", "--streams", "1"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "x=127.0.0.1:80", "x=http://a,x=http://b", "x=http://a+b"])
def test_targets_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "hops", "--target", text])
