"""The model in memory: loaded at the start, freed after a time without requests, loaded again for the next one.

What is small stays: name, context, tokenizer, the engine's counters. Runs on the event loop; the work is done in
threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.engine import Engine
from slipstream.errors import LoadError, SlipstreamError
from slipstream.load import Tokenizer
from slipstream.server.errors import ApiError
from slipstream.server.service.status import ModelFacts, StatusMonitor

OnDeath = Callable[[Exception], None]
T = TypeVar("T")
log = logging.getLogger("slipstream.server")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be served. Its engine is not started yet."""

    engine: Engine
    tokenizer: Tokenizer
    facts: ModelFacts
    release: Callable[[], None] = _nothing  # after the engine's end: hands free memory back to the system


Load = Callable[[OnDeath], LoadedModel]  # blocks


class ModelHolder:
    def __init__(self, monitor: StatusMonitor, idle_seconds: float | None) -> None:
        self.loaded: LoadedModel | None = None
        self.engine: AsyncEngine | None = None
        self._monitor = monitor
        self._idle_seconds = idle_seconds
        self._num_users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sleep: asyncio.Task[None] | None = None  # while it is freed or about to be
        self._wake: asyncio.Task[None] | None = None

    async def load(self, load: Load, on_death: OnDeath, on_ready: Callable[[LoadedModel], None]) -> None:
        """For the first time. Raises what stopped it."""
        self._load, self._on_death, self._on_ready = load, on_death, on_ready
        await self._load_once()
        if self._monitor.state == "loading":
            self._monitor.state = "ready"
        self._start_timer()

    async def _load_once(self) -> None:
        loaded = await in_own_thread(lambda: self._load(self._on_death))
        engine = AsyncEngine(loaded.engine)
        engine.attach()
        await in_own_thread(loaded.engine.start)
        if self.loaded is not None and self.loaded.tokenizer is not loaded.tokenizer:
            loaded.tokenizer.close()
            loaded = replace(loaded, tokenizer=self.loaded.tokenizer)  # requests that wait were prepared with it
        self.loaded, self.engine = loaded, engine
        self._monitor.loaded(loaded.engine, loaded.facts)
        self._on_ready(loaded)

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[AsyncEngine]:
        """Not freed meanwhile. Waits until it is loaded again if it was freed."""
        self._num_users += 1
        self._stop_timer()
        try:
            await self.awake()
            assert self.engine is not None
            yield self.engine
        finally:
            self._num_users -= 1
            self._start_timer()

    async def awake(self, seconds: float | None = None) -> bool:
        """Loads it again if it was freed; goes on with that if the caller leaves. False: not within ``seconds``."""
        if self._sleep is None:
            return True
        if self._wake is None:
            self._wake = asyncio.create_task(self._load_again(self._sleep))
            self._wake.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if all have left
        wake = self._wake
        if not (await asyncio.wait({wake}, timeout=seconds))[0]:
            return False
        wake.result()
        return True

    async def _load_again(self, sleep: asyncio.Task[None]) -> None:
        began = time.monotonic()
        try:
            await sleep
            self._monitor.move("sleeping", "waking")
            await self._load_once()
            self._monitor.move("waking", "ready")
            self._sleep = None
            log.info("the model is loaded again, after %.1f s", time.monotonic() - began)
        except Exception as error:
            self._monitor.move("waking", "sleeping")
            why = as_load_error(error)
            log.error("the model cannot be loaded again: %s", why)
            raise ApiError(503, f"the model cannot be loaded again: {why}", code="loading", retry_after=5) from error
        finally:
            self._wake = None
            self._start_timer()

    def _start_timer(self) -> None:
        if self._idle_seconds is not None and not self._num_users and self._sleep is None:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._fall_asleep)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fall_asleep(self) -> None:
        if self._monitor.state == "ready":
            self._monitor.state = "sleeping"
            self._sleep = asyncio.create_task(self._free())

    async def _free(self) -> None:
        assert self.loaded is not None
        log.info("no request for %g s: the model's memory is freed until the next one", self._idle_seconds)
        await in_own_thread(self.loaded.engine.close)
        self.engine = None
        await in_own_thread(self.loaded.release)

    async def close(self) -> None:
        self._stop_timer()
        if self.engine is not None and self.engine.engine.alive:
            await self.engine.close()


def as_load_error(error: BaseException) -> SlipstreamError:
    if isinstance(error, SlipstreamError):
        return error
    log.error("loading failed", exc_info=error)
    return LoadError(f"The model cannot be loaded: {type(error).__name__}: {error}")


async def in_own_thread(work: Callable[[], T]) -> T:
    """In a thread that the process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def main() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # a library's panic included, which is no Exception
            failed = error if isinstance(error, Exception) else as_load_error(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failed)

    threading.Thread(target=main, name="slipstream-load", daemon=True).start()
    return await future
