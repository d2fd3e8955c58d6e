"""A server that speaks the page's side of the API with scripted answers: slow, broken, full or gone on demand.

What the page asked is kept in ``requests``; what it hears is set in ``replies`` (by the last user message) and
``status``.
"""

from __future__ import annotations

import copy
import json
import select
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "slipstream" / "server" / "page"
CSP = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "state": "ready",
    "uptime_s": 3725.0,
    "model": {
        "id": "smollm2-135m-instruct",
        "architecture": "llama",
        "format": "Q4_1",
        "context": 2048,
        "vocab": 49152,
    },
    "device": {"runner": "torch", "note": "CPU, own kernels, 2 threads"},
    "speculation": {
        "available": True,
        "why_not": None,
        "policy": "adaptive",
        "depth": 2,
        "reason": "1 row: a second draft is accepted often enough to pay for verifying it",
        "max_depth": 4,
        "drafts": 500,
        "draft_tokens": 1100,
        "accepted_tokens": 700,
        "accepted_per_position": [380, 220, 100, 0],
        "drafted_per_position": [500, 400, 200, 0],
        "mean_accepted_length": 2.4,
        "tokens_per_step": 2.37,
        "plain_row_steps": 12,
    },
    "sampling_defaults": {"temperature": 0.2, "top_p": 0.9},
    "load": {
        "running": 0,
        "waiting": 0,
        "max_streams": 16,
        "queue_limit": 256,
        "tokens_per_second": 0.0,
        "generated_tokens": 1234,
        "prompt_tokens": 400,
        "requests": {"stop": 3, "length": 1, "abort": 0, "error": 0},
    },
    "streams": [],
    "prefix_cache": {
        "enabled": True,
        "queried_tokens": 1200,
        "found_tokens": 996,
        "blocks": 40,
        "states_used": 0,
        "states_total": 0,
    },
    "memory": {
        "kv_blocks_total": 512,
        "kv_blocks_used": 37,
        "block_size": 16,
        "kv_bytes": 188743680,
        "weight_bytes": 98000000,
        "state_bytes": 0,
        "rss_bytes": 734003200,
    },
}


def pieces_of(text: str, depth: int = 3) -> list[tuple[str, int]]:
    """The text as made-up tokens: runs of 0 to `depth` accepted drafts, each followed by one of the model's own."""
    words = text.replace("\n", " \n").split(" ")
    tokens = [word if i == 0 or word.startswith("\n") else " " + word for i, word in enumerate(words)]
    out: list[tuple[str, int]] = []
    run = 0
    while len(out) < len(tokens):
        take = tokens[len(out) : len(out) + run + 1]
        out += [(token, k + 1 if k < run else 0) for k, token in enumerate(take)]
        run = (run + 1) % (depth + 1)
    return out


@dataclass
class Reply:
    """One scripted answer. With `hold_after` it waits there for `go`; `ended` says how it went: done or left."""

    pieces: list[tuple[str, int]] = field(default_factory=lambda: pieces_of("A short answer of a few words."))
    hold_after: int | None = None
    go: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    left: bool = False
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    break_after: int | None = None  # the connection is cut there
    fail_after: int | None = None  # an error event comes there
    with_origins: bool = True
    thinking: str = ""  # before the pieces
    finish: str = "stop"
    speculation: str = "drafted in 61 % of steps; off where a plain step was faster"
    gain: float | None = 1.6
    cached_tokens: int = 0
    cache_note: str = ""

    def timings(self) -> dict[str, Any]:
        by_position = [sum(k == i for _, k in self.pieces) for i in range(1, 4)]
        return {
            "queue_ms": 10.0,
            "prompt_n": 20,
            "prompt_ms": 40.0,
            "prompt_per_second": 500.0,
            "cached_tokens": self.cached_tokens,
            "cache_note": self.cache_note,
            "predicted_n": len(self.pieces),
            "predicted_ms": 1000.0,
            "predicted_per_second": 41.25,
            "draft_n": sum(by_position) + 4,
            "draft_n_accepted": sum(by_position),
            "accepted_per_position": by_position,
            "speculation": self.speculation,
            "gain": self.gain,
        }


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a page asks for all its files at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.request_ids: list[str] = []
        self.replies: dict[str, Reply] = {}
        self.status: dict[str, Any] = copy.deepcopy(STATUS)
        self.status_code = 200
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> ScriptedServer:
        self.thread.start()
        return self

    def stop(self) -> None:
        """Refuses connections from now on; answers that wait are let go."""
        for reply in self.replies.values():
            reply.go.set()
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/v1/status":
            body = self.server.status if self.server.status_code == 200 else error("no key or a wrong one")
            self.answer(self.server.status_code, "application/json", json.dumps(body).encode())
        elif path == "/" or path.startswith("/page/"):
            self.serve_file(PAGE / ("index.html" if path == "/" else path.removeprefix("/page/")))
        else:
            self.answer(404, "application/json", json.dumps(error("no such path")).encode())

    def serve_file(self, file: Path) -> None:
        if not file.is_file():
            self.answer(404, "text/plain", b"")
            return
        self.answer(200, TYPES[file.suffix], file.read_bytes(), {"Content-Security-Policy": CSP})

    def answer(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.close_connection = True  # so that a server that stopped is gone at once
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Connection": "close", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.request_ids.append(self.headers["X-Request-Id"])
        asked = [message["content"] for message in request["messages"] if message["role"] == "user"]
        reply = self.server.replies.get(asked[-1]) or Reply()
        if reply.status != 200:
            self.answer(reply.status, "application/json", json.dumps(error(reply.message)).encode(), reply.headers)
            return
        try:
            self.stream(reply, request)
        except OSError:
            reply.left = True
        reply.ended.set()

    def stream(self, reply: Reply, request: dict[str, Any]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        name = f"chatcmpl-{len(self.server.requests)}"
        self.event({"id": name, "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        for thought in reply.thinking.split():
            delta = {"reasoning_content": f"{thought} "}
            self.event({"id": name, "choices": [{"index": 0, "delta": delta, "origins": [[f"{thought} ", 0]]}]})
        for i, (text, origin) in enumerate(reply.pieces):
            if i == reply.hold_after and not self.wait_for(reply.go):
                reply.left = True
                return
            if i == reply.break_after:
                return
            if i == reply.fail_after:
                self.event(error("the engine failed"))
                return
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            if request.get("return_origins") and reply.with_origins:
                choice["origins"] = [[text, origin]]
            self.event({"id": name, "choices": [choice]})
        end = {"index": 0, "delta": {}, "finish_reason": reply.finish}
        self.event({"id": name, "choices": [end], "timings": reply.timings()})
        usage = {"prompt_tokens": 20, "completion_tokens": len(reply.pieces), "total_tokens": 20 + len(reply.pieces)}
        self.event({"id": name, "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def wait_for(self, go: threading.Event) -> bool:
        """Sends keep-alives until `go`; False where the client left."""
        while not go.wait(0.02):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                return False
            self.wfile.write(b": keep-alive\n\n")
        return True

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
