"""What all endpoints share: the loaded model, the engine, who may come in, and how prompts are made ready.

Belongs to the event loop; texts are rendered and tokenised in worker threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from slipstream.config import EngineConfig
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.engine import Engine
from slipstream.host import lower_priority
from slipstream.load import Tokenizer
from slipstream.server.choice import Choice
from slipstream.server.errors import ApiError, engine_failed, shutting_down
from slipstream.server.generation import Generation
from slipstream.server.job import Job
from slipstream.server.metrics import Metrics
from slipstream.server.prepare import Preparation, Prepared
from slipstream.server.settings import ServerConfig
from slipstream.server.status import ModelFacts, Watch

PREPARE_THREADS = 2
GRAMMAR_THREADS = 2
SMALL_BODY = 1 << 16  # bytes that are parsed where they are: a thread would cost more
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can be served. Its engine is not started yet."""

    engine: Engine
    tokenizer: Tokenizer
    facts: ModelFacts


class Service:
    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        self.config = config
        self.engine_config = engine_config
        self.watch = Watch(config.queue_limit)
        self.metrics = Metrics(self.watch)
        self.created = int(time.time())
        self._limit = engine_config.max_streams + config.queue_limit
        self._threads = ThreadPoolExecutor(PREPARE_THREADS, "slipstream-prepare")
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "slipstream-grammar", lower_priority)
        self._loaded: Loaded | None = None
        self._preparation: Preparation | None = None
        self._engine: AsyncEngine | None = None
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._live: set[Generation] = set()
        self._request_seconds = 1.0  # a running mean: for Retry-After

    # What is loaded.

    def attach(self, loaded: Loaded) -> None:
        """The engine belongs to this loop from now on; it may be started by any thread."""
        self._engine = AsyncEngine(loaded.engine)
        self._engine.attach()
        self._loaded = loaded
        self._preparation = Preparation(loaded.tokenizer)

    def ready(self) -> None:
        assert self._loaded is not None
        self.watch.loaded(self._loaded.engine, self._loaded.facts)
        if self.watch.state == "loading":
            self.watch.state = "ready"

    def loaded(self) -> Loaded:
        """The model, or the error that says why there is none (any more)."""
        match self.watch.state:
            case "loading":
                raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)
            case "failed":
                raise engine_failed()
        assert self._loaded is not None
        return self._loaded

    # Who is inside.

    @asynccontextmanager
    async def admitted(self, num_answers: int = 1) -> AsyncIterator[Loaded]:
        """A place for each answer to a request, from before its prompt is read until all of them are out."""
        loaded = self.loaded()
        if self.watch.state == "draining":
            raise shutting_down()
        if self._num_inside + num_answers > self._limit:
            raise ApiError(429, "too many requests are waiting", code="queue_full", retry_after=self._retry_after())
        self._num_inside += num_answers
        self._empty.clear()
        try:
            yield loaded
        finally:
            self._num_inside -= num_answers
            if not self._num_inside:
                self._empty.set()

    def _retry_after(self) -> int:
        """About when a place should be free: the queue moves as fast as requests finish."""
        rounds = 1 + self.config.queue_limit / self.engine_config.max_streams
        return min(60, max(1, math.ceil(self._request_seconds * rounds / 2)))

    @asynccontextmanager
    async def generation(self, job: Job) -> AsyncIterator[Generation]:
        """The answers to one job. Leaving early, by whatever way, aborts them."""
        latencies = [self.metrics.latencies() for _ in range(job.num_choices)]
        async with self.admitted(job.num_choices) as loaded:
            prepared = await self._constrain(job, await self.prepare(job))
            began = time.monotonic()
            assert self._engine is not None
            streams = self._engine.submit_many(prepared.tokens, prepared.params, job.num_choices)
            async with AsyncExitStack() as leaving:
                for stream in streams:
                    await leaving.enter_async_context(stream)
                choices = [
                    Choice(index, stream, loaded.tokenizer, prepared, times)
                    for index, (stream, times) in enumerate(zip(streams, latencies, strict=True))
                ]
                generation = Generation(choices, len(prepared.tokens))
                self._live.add(generation)
                try:
                    yield generation
                finally:
                    self._live.discard(generation)
                    self._request_seconds += 0.1 * (time.monotonic() - began - self._request_seconds)

    # Work that would hold the loop up.

    async def prepare(self, job: Job) -> Prepared:
        """All but its constraint."""
        assert self._preparation is not None
        return await self.in_thread(partial(self._preparation.prepare, job))

    async def _constrain(self, job: Job, prepared: Prepared) -> Prepared:
        """In a pool of its own: a hard grammar keeps nobody's prompt waiting."""
        assert self._preparation is not None
        if not self._preparation.constrains(job, prepared):
            return prepared
        work = partial(self._preparation.constrain, job, prepared)
        return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # The end.

    async def drain(self) -> None:
        """Take nothing new; let what runs finish, or end it when the time is up."""
        if self.watch.state != "failed":
            self.watch.state = "draining"
        if not await self._wait_empty(self.config.drain_seconds):
            for generation in list(self._live):
                generation.abort()
            await self._wait_empty(GOODBYE_SECONDS)

    async def fail(self) -> None:
        """The engine is dead and has told every stream so; give the clients a moment to hear it."""
        self.watch.state = "failed"
        await asyncio.sleep(GOODBYE_SECONDS / 2)
        await self._wait_empty(GOODBYE_SECONDS)

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
        if self._engine is not None and self._engine.engine.alive:
            await self._engine.close()


GOODBYE_SECONDS = 2.0  # for clients to be told that it is over
