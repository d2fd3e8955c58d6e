"""A real server in this process, on a port of its own, for benchmarks that need both ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.commands.options import ModelOptions
from slipstream.commands.serve import Loading
from slipstream.server.lifecycle import Server
from slipstream.server.service import Loaded
from slipstream.server.settings import ServerConfig


@contextmanager
def served(options: ModelOptions) -> Iterator[tuple[int, Loaded]]:
    """Its port, and what it serves. What ended the server is raised: at once if it never began."""
    ready = threading.Event()
    found: list[Loaded] = []

    def keep(loaded: Loaded) -> None:
        found.append(loaded)
        ready.set()

    server = Server(ServerConfig(port=0), options.engine_config, Loading(options), keep)
    thread = threading.Thread(target=_run, args=(server, ready))
    thread.start()
    ready.wait()
    try:
        if found:
            yield server.listener.getsockname()[1], found[0]
    finally:
        if found:
            server.stop()
        thread.join()
    if server.error is not None:
        raise server.error


def _run(server: Server, ready: threading.Event) -> None:
    try:
        server.run()
    finally:
        ready.set()
