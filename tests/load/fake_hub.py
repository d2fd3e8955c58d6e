"""A model hub on 127.0.0.1 that serves a folder: `owner/repository/files`, to the hub's own client."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 39 + "1"
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_ETAG_TIMEOUT": "1"}  # for an environment: nobody answers there


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.sent: list[str] = []  # the files whose bytes were asked for
        self.open = threading.Event()  # cleared: no file's bytes are sent
        self.open.set()
        self.broken = ""  # files whose names begin so are not to be had

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, repository: str) -> dict[str, Path]:
        folder = self.root / repository
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), parts[4:], with_body)
        else:
            self._send_file("/".join(parts[:2]), "/".join(parts[4:]), with_body)

    def _describe(self, repository: str, rest: list[str], with_body: bool) -> None:
        files = self.server.files(repository)
        if not files:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
            return
        listed = [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0"} for name, path in files.items()
        ]
        info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(listed if "tree" in rest else info).encode(), {}, with_body)

    def _send_file(self, repository: str, name: str, with_body: bool) -> None:
        path = self.server.files(repository).get(name)
        if self.server.broken and Path(name).name.startswith(self.server.broken):
            self._send(403, b"", {}, with_body)
            return
        if path is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        content = path.read_bytes()
        if with_body:
            self.server.sent.append(name)
            self.server.open.wait()
        self._send(
            200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, with_body
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            with suppress(ConnectionError):  # whoever asked has left
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


@contextmanager
def fake_hub(root: Path) -> Iterator[FakeHub]:
    hub = FakeHub(root)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.open.set()
        hub.shutdown()
        thread.join()
        hub.server_close()


def environment(hub: FakeHub, cache: Path) -> dict[str, str]:
    """Of a process that knows this hub alone."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own
