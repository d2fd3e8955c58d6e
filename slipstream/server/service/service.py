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
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from slipstream.config import EngineConfig
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.engine import Engine
from slipstream.host import lower_priority
from slipstream.load import Tokenizer
from slipstream.server.errors import ApiError, engine_failed, shutting_down
from slipstream.server.service.choice import ChoiceStream
from slipstream.server.service.generation import Generation
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.metrics import Metrics
from slipstream.server.service.prepare import Preparation, Prepared
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import ModelFacts, StatusMonitor
from slipstream.server.text.markup.chat_format import ChatFormat
from slipstream.server.text.tools import ToolUse

PREPARE_THREADS = 2
GRAMMAR_THREADS = 2
SMALL_BODY = 8 << 10  # bytes; up to this size bodies are parsed on the event loop: a thread would cost more
FINAL_ERROR_SECONDS = 2.0  # for clients to receive their last error
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be served. Its engine is not started yet."""

    engine: Engine
    tokenizer: Tokenizer
    facts: ModelFacts


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
        self._loaded: LoadedModel | None = None
        self._preparation: Preparation | None = None
        self._engine: AsyncEngine | None = None
        self._num_admitted = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._live: set[Generation] = set()
        self._request_seconds = 1.0  # running mean duration, for Retry-After

    # The loaded model.

    def attach(self, loaded: LoadedModel) -> None:
        """Binds the engine to this event loop. Any thread may start it afterwards."""
        self._engine = AsyncEngine(loaded.engine)
        self._engine.attach()
        self._loaded = loaded
        self._preparation = Preparation(loaded.tokenizer)

    def ready(self) -> None:
        assert self._loaded is not None
        self.monitor.loaded(self._loaded.engine, self._loaded.facts)
        if self.monitor.state == "loading":
            self.monitor.state = "ready"

    def loaded(self) -> LoadedModel:
        """The model; raises ApiError while it loads and after the engine failed."""
        match self.monitor.state:
            case "loading":
                raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)
            case "failed":
                raise engine_failed()
        assert self._loaded is not None
        return self._loaded

    @property
    def chat_format(self) -> ChatFormat:
        self.loaded()
        assert self._preparation is not None
        return self._preparation.chat_format

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
        requests = request.by_prompt()
        num_choices = len(requests) * request.num_choices
        latencies = [self.metrics.latencies() for _ in range(num_choices)]
        async with self.admitted(num_choices) as loaded:
            prepared = [await self._constrain(await self.prepare(each)) for each in requests]
            began = time.monotonic()
            assert self._engine is not None
            async with AsyncExitStack() as open_streams:
                choices: list[ChoiceStream] = []
                for each in prepared:
                    for stream in self._engine.submit_many(each.tokens, each.params, request.num_choices):
                        await open_streams.enter_async_context(stream)
                        index = len(choices)
                        choices.append(ChoiceStream(index, stream, loaded.tokenizer, each, latencies[index]))
                warnings = (*request.warnings, *prepared[0].warnings)
                generation = Generation(choices, [each.tokens for each in prepared], warnings)
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

    async def render(self, prompt: ChatPrompt, tools: ToolUse) -> str:
        """The text of a chat prompt."""
        assert self._preparation is not None
        text, _ = await self.in_thread(partial(self._preparation.render, prompt, tools))
        return text

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
        if self._engine is not None and self._engine.engine.alive:
            await self._engine.close()
