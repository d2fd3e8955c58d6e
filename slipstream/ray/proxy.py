"""The start of Ray's proxy. On a busy machine Ray ends a proxy that is late, and its controller starts another."""

from __future__ import annotations

import time
from typing import Any

PROXY_SECONDS = 300.0  # for one to start


def start_proxy(serve: Any, late: tuple[type[Exception], ...], http_options: dict[str, object]) -> None:
    """Returns when it takes connections. ``serve``: Ray's module; ``late``: what its start raises if it gives up."""
    try:
        serve.start(http_options=http_options)
    except late:
        serve.start(http_options=http_options)  # finds the controller, and waits for nothing
        _wait_for_proxy(serve)


def _wait_for_proxy(serve: Any) -> None:
    deadline = time.monotonic() + PROXY_SECONDS
    while "HEALTHY" not in serve.status().proxies.values():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ray's proxy did not start within {PROXY_SECONDS:.0f} seconds")
        time.sleep(0.2)
