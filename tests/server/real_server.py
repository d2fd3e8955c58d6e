"""`slipstream serve` on the default model, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

import httpx

COMMAND = [sys.executable, "-m", "slipstream.cli"]
WAIT = 300.0


class RealServer:
    """``loaded=False``: do not wait until the model is loaded. ``command``: another program with the same flags."""

    def __init__(
        self,
        *arguments: str,
        port: int = 0,
        command: list[str] | None = None,
        loaded: bool = True,
        env: dict[str, str] | None = None,
    ) -> None:
        launch = [*(command or [*COMMAND, "serve"]), "--port", str(port), *arguments]
        self.process = subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for(r"listening on (\S+)/,")
        self.port = int(self.url.rpartition(":")[2])
        if loaded:
            self.wait_until_loaded()

    def wait_until_loaded(self) -> None:
        self._wait_for(r"^page    (\S+)$")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))

    def _wait_for(self, pattern: str) -> str:
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            for line in list(self.output):
                if found := re.search(pattern, line):
                    return found[1]
            assert self.process.poll() is None, "\n".join(self.output)
            time.sleep(0.02)
        raise AssertionError("\n".join(self.output))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT)

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/v1/status", timeout=WAIT).json())

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        code = self.process.wait(WAIT)
        self._reader.join(WAIT)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def __enter__(self) -> RealServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        self.wait()
