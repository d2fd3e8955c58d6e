"""Shared by all endpoints: the loaded model, the engine, admission, and the preparation of requests.

Runs on the event loop; prompts are rendered and tokenised in worker threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from slipstream.config import EngineConfig
from slipstream.host import lower_priority
from slipstream.server.errors import ApiError, engine_failed, shutting_down
from slipstream.server.service.choice import ChoiceStream
from slipstream.server.service.generation import Generation
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.metrics import Metrics
from slipstream.server.service.model_holder import Load, LoadedModel, ModelHolder, OnDeath
from slipstream.server.service.prepare import Preparation, Prepared
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import StatusMonitor

PREPARE_THREADS = 2
GRAMMAR_THREADS = 2
SMALL_BODY = 1 << 16  # bytes; up to this size bodies are parsed on the event loop: a thread would cost more
FINAL_ERROR_SECONDS = 2.0  # for clients to receive their last error
T = TypeVar("T")


class Service:
    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        self.config = config
        self.engine_config = engine_config
        self.monitor = StatusMonitor(config.queue_limit)
        self.metrics = Metrics(self.monitor)
        self.created = int(time.time())
        self._limit = engine_config.max_streams + config.queue_limit
        self._threads = ThreadPoolExecutor(PREPARE_THREADS, "slipstream-prepare")
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "slipstream-grammar", lower_priority)
        self.holder = ModelHolder(self.monitor, config.sleep_idle_seconds)
        self._preparation: Preparation | None = None
        self._num_admitted = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._live: set[Generation] = set()
        self._request_seconds = 1.0  # running mean duration, for Retry-After

    # The loaded model.

    async def load(self, load: Load, on_death: OnDeath, on_ready: Callable[[LoadedModel], None]) -> None:
        """Returns when the model is loaded; raises what stopped it. ``on_ready``: called whenever it is loaded."""

        def ready(loaded: LoadedModel) -> None:
            if self._preparation is None:
                self._preparation = Preparation(loaded.tokenizer)
            on_ready(loaded)

        await self.holder.load(load, on_death, ready)

    def loaded(self) -> LoadedModel:
        """The model; raises ApiError while it loads for the first time and after the engine failed."""
        match self.monitor.state:
            case "loading":
                raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)
            case "failed":
                raise engine_failed()
        assert self.holder.loaded is not None
        return self.holder.loaded

    # Admission.

    @asynccontextmanager
    async def admitted(self, num_choices: int = 1) -> AsyncIterator[LoadedModel]:
        """Counts the choices against the queue limit, from before the prompt is prepared until all are finished."""
        loaded = self.loaded()
        if self.monitor.state == "draining":
            raise shutting_down()
        if self._num_admitted + num_choices > self._limit:
            raise ApiError(429, "too many requests are waiting", code="queue_full", retry_after=self._retry_after())
        self._num_admitted += num_choices
        self._empty.clear()
        try:
            yield loaded
        finally:
            self._num_admitted -= num_choices
            if not self._num_admitted:
                self._empty.set()

    def _retry_after(self) -> int:
        """Seconds until the queue is likely to have room: it moves as fast as requests finish."""
        rounds = 1 + self.config.queue_limit / self.engine_config.max_streams
        return min(60, max(1, math.ceil(self._request_seconds * rounds / 2)))

    @asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Runs one request. Leaving the context early, for any reason, aborts it."""
        latencies = [self.metrics.latencies() for _ in range(request.num_choices)]
        async with self.admitted(request.num_choices) as loaded, self.holder.in_use() as engine:
            prepared = await self._constrain(await self.prepare(request))
            began = time.monotonic()
            streams = engine.submit_many(prepared.tokens, prepared.params, request.num_choices)
            async with AsyncExitStack() as open_streams:
                for stream in streams:
                    await open_streams.enter_async_context(stream)
                choices = [
                    ChoiceStream(index, stream, loaded.tokenizer, prepared, times)
                    for index, (stream, times) in enumerate(zip(streams, latencies, strict=True))
                ]
                generation = Generation(choices, len(prepared.tokens))
                self._live.add(generation)
                try:
                    yield generation
                finally:
                    self._live.discard(generation)
                    self._request_seconds += 0.1 * (time.monotonic() - began - self._request_seconds)

    # Work that would block the event loop.

    async def prepare(self, request: GenerationRequest) -> Prepared:
        """Everything but the constraint."""
        assert self._preparation is not None
        return await self.in_thread(partial(self._preparation.prepare, request))

    async def _constrain(self, prepared: Prepared) -> Prepared:
        """In a separate thread pool, so that complex grammars do not delay prompts."""
        assert self._preparation is not None
        if not prepared.needs_constraint:
            return prepared
        work = partial(self._preparation.constrain, prepared)
        return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # Shutdown.

    async def drain(self) -> None:
        """Admits no new requests and waits for the admitted ones; aborts them after `drain_seconds`."""
        if self.monitor.state != "failed":
            self.monitor.state = "draining"
        if not await self._wait_empty(self.config.drain_seconds):
            for generation in list(self._live):
                generation.abort()
            await self._wait_empty(FINAL_ERROR_SECONDS)

    async def fail(self) -> None:
        """The engine failed, and every stream has the error: waits for clients to receive it."""
        self.monitor.state = "failed"
        await asyncio.sleep(FINAL_ERROR_SECONDS / 2)
        await self._wait_empty(FINAL_ERROR_SECONDS)

    async def _wait_empty(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        for pool in (self._threads, self._grammar_threads):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._preparation is not None:
            self._preparation.close()
        await self.holder.close()
