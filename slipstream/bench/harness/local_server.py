"""A real server in this process, on a port of its own, for benchmarks that need both ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.commands.options import ModelOptions
from slipstream.commands.serve import Loading
from slipstream.server.http.lifecycle import Server
from slipstream.server.service.model_holder import LoadedModel
from slipstream.server.service.settings import ServerConfig


@contextmanager
def served(options: ModelOptions) -> Iterator[tuple[int, LoadedModel]]:
    """Its port, and what it serves. What ended the server is raised: at once if it never began."""
    ready = threading.Event()
    found: list[LoadedModel] = []

    def keep(loaded: LoadedModel) -> None:
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
