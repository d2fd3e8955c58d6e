"""A few worker processes of one kind, for any thread."""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import Any

from slipstream.workers.process import Unavailable, WorkerProcess

WAIT_SECONDS = 60.0  # for others' requests


class WorkerPool:
    def __init__(self, module: str, first: Any, size: int) -> None:
        self._workers = [WorkerProcess(module, first) for _ in range(size)]
        # The one that was busy last is asked first: the others need not run before there is work for several.
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def start(self) -> None:
        """All of them, without waiting until they are ready. Before the first request, which says what failed."""
        with suppress(Unavailable):
            for worker in self._workers:
                worker.start()

    def ask(self, request: Any, seconds: float) -> Any:
        """As WorkerProcess.ask. A request that waits too long for the others is Unavailable, too."""
        try:
            worker = self._idle.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise Unavailable("it is busy with other requests") from None
        try:
            return worker.ask(request, seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
