"""Shared by all endpoints: the loaded model, the engine, admission, and the preparation of requests.

Runs on the event loop; prompts are rendered and tokenised in worker threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from slipstream.config import EngineConfig
from slipstream.host import lower_priority
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError, engine_failed, shutting_down
from slipstream.server.service.admission import FairThreads, Places
from slipstream.server.service.caller import caller
from slipstream.server.service.choice import ChoiceStream
from slipstream.server.service.generation import Generation
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.metrics import Metrics
from slipstream.server.service.model_holder import Load, LoadedModel, ModelHolder, OnDeath
from slipstream.server.service.prepare import Preparation, Prepared, RenderedChat
from slipstream.server.service.prompts import ChatPrompt
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import StatusMonitor
from slipstream.server.text.markup.chat_format import ChatFormat
from slipstream.server.text.tools import ToolUse

PREPARE_THREADS = 2
TEMPLATE_THREADS = 2
GRAMMAR_THREADS = 2
SMALL_BODY = 8 << 10  # bytes; up to this size bodies are parsed on the event loop: a thread would cost more
FINAL_ERROR_SECONDS = 2.0  # for clients to receive their last error
T = TypeVar("T")


class Service:
    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        self.config = config
        self.engine_config = engine_config
        self.monitor = StatusMonitor(config.queue_limit)
        self.metrics = Metrics(self.monitor)
        self.created = int(time.time())
        limit = engine_config.max_streams + config.queue_limit
        self._places = Places(limit, self._queue_full, self._running)
        self._threads = FairThreads(PREPARE_THREADS, "slipstream-prepare", limit, self._queue_full)
        self._template_threads = FairThreads(TEMPLATE_THREADS, "slipstream-template", limit, self._queue_full)
        self._grammar_threads = FairThreads(
            GRAMMAR_THREADS, "slipstream-grammar", limit, self._queue_full, lower_priority
        )
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
            self.engine_config = loaded.engine.config  # with the model's sampling defaults
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

    @property
    def chat_format(self) -> ChatFormat:
        self.loaded()
        assert self._preparation is not None
        return self._preparation.chat_format

    # Admission.

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[LoadedModel]:
        """A request that draining waits for. Those that generate take a place in the engine once they are prepared."""
        loaded = self.loaded()
        if self.monitor.state == "draining":
            raise shutting_down()
        self._num_admitted += 1
        self._empty.clear()
        try:
            yield loaded
        finally:
            self._num_admitted -= 1
            if not self._num_admitted:
                self._empty.set()

    def _queue_full(self) -> ApiError:
        return ApiError(429, "too many requests are waiting", code="queue_full", retry_after=self._retry_after())

    def _retry_after(self) -> int:
        """Seconds until the queue is likely to have room: it moves as fast as requests finish."""
        rounds = 1 + self.config.queue_limit / self.engine_config.max_streams
        return min(60, max(1, math.ceil(self._request_seconds * rounds / 2)))

    def _running(self) -> list[str]:
        engine = self.holder.engine
        return [] if engine is None else [stream.id for stream in engine.engine.streams()]

    @asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Runs one request. Leaving the context early, for any reason, aborts it."""
        requests = request.by_prompt()
        client, num_choices = caller().client, len(requests) * request.num_choices
        latencies = [
            each for _ in requests for each in self.metrics.latencies(request.num_choices, request.params.max_tokens)
        ]
        async with self.admitted() as loaded, self.holder.in_use() as engine:
            self._places.check(client, num_choices)
            limit = loaded.engine.info.max_model_len
            prepared = [await self._constrain(await self.prepare(each, limit)) for each in requests]
            began = time.monotonic()
            async with AsyncExitStack() as held:
                place = held.enter_context(self._places.taken(client, num_choices))
                choices: list[ChoiceStream] = []
                for each in prepared:
                    for stream in engine.submit_many(each.tokens, each.params, request.num_choices, client, each.cache):
                        held.enter_context(self.monitor.named(stream.id, caller().request_id))
                        await held.enter_async_context(stream)
                        index = len(choices)
                        choices.append(ChoiceStream(index, stream, loaded.tokenizer, each, latencies[index]))
                warnings = (*request.warnings, *prepared[0].warnings)
                place.generation = generation = Generation(choices, [each.tokens for each in prepared], warnings)
                self._live.add(generation)
                try:
                    yield generation
                finally:
                    self._live.discard(generation)
                    self._request_seconds += 0.1 * (time.monotonic() - began - self._request_seconds)
                    _note_tokens(generation)

    # Work that would block the event loop.

    async def prepare(self, request: GenerationRequest, max_tokens: int | None = None) -> Prepared:
        """Everything but the constraint. Chats are rendered in threads of their own: a template may take long.
        ``max_tokens``: a longer prompt may be refused before all of it is read."""
        assert self._preparation is not None
        request = _of_caller(request)
        rendered = await self._render(request, request.prompt) if isinstance(request.prompt, ChatPrompt) else None
        return await self.in_thread(partial(self._preparation.prepare, request, rendered, max_tokens))

    async def render(self, prompt: ChatPrompt, tools: ToolUse) -> str:
        """The text of a chat prompt."""
        request = _of_caller(GenerationRequest(prompt, SamplingParams(), tools=tools))
        return (await self._render(request, prompt)).text

    async def _render(self, request: GenerationRequest, prompt: ChatPrompt) -> RenderedChat:
        assert self._preparation is not None
        return await self._template_threads.run(caller().client, partial(self._preparation.render, request, prompt))

    async def _constrain(self, prepared: Prepared) -> Prepared:
        """In threads of their own, so that complex grammars do not delay prompts."""
        assert self._preparation is not None
        if not prepared.needs_constraint:
            return prepared
        return await self._grammar_threads.run(caller().client, partial(self._preparation.constrain, prepared))

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await self._threads.run(caller().client, work)

    # Shutdown.

    @property
    def num_generations(self) -> int:
        """Answers that are being written, or wait for their turn."""
        return len(self._live)

    async def drain(self) -> None:
        """Admits no new requests and waits for the admitted ones; aborts them after `drain_seconds`."""
        if self.monitor.state != "failed":
            self.monitor.state = "draining"
        if not await self._wait_empty(self.config.drain_seconds):
            for generation in list(self._live):
                generation.abort(shutting_down())
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
        for threads in (self._threads, self._template_threads, self._grammar_threads):
            threads.close()
        if self._preparation is not None:
            self._preparation.close()
        await self.holder.close()


def _of_caller(request: GenerationRequest) -> GenerationRequest:
    """Callers with different API keys share nothing, whatever salt they send."""
    key, salt = caller().key, request.cache.salt
    return replace(request, cache=replace(request.cache, salt=f"{key}:{salt}")) if key or salt else request


def _note_tokens(generation: Generation) -> None:
    """For the access log."""
    noted = caller()
    noted.num_prompt = generation.num_prompt
    if (total := generation.total) is not None:
        noted.num_output = total.num_output
