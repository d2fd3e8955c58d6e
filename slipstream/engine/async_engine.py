"""The engine for asyncio: each request is an async iterator of events.

The engine thread never waits for a consumer: events go to one deque, and the loop is woken to spread them, at most once
in REST_SECONDS: where steps are faster than that, waking it for each of them would take time from the steps. The first
and the last event of a request do not wait for that. Leaving an iterator early, by aclose() or by cancellation, aborts
its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

from slipstream.engine.engine import Engine
from slipstream.engine.request import DEFAULT_CACHE, FinishReason, PromptCache, TokenEvent
from slipstream.engine.stats import StatsSnapshot
from slipstream.sampling.params import SamplingParams

REST_SECONDS = 0.01


class TokenStream:
    """The events of one request; the last one has a finish_reason. For one consumer."""

    def __init__(self, engine: Engine) -> None:
        self.id = ""  # known once the request is submitted
        self.finished = False  # the consumer has seen the final event, or has left
        self.started = False  # the engine has sent an event
        self._engine = engine
        self._events: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self.nudge()

    def nudge(self) -> None:
        """``ready`` returns, with or without an event."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """The next event or nudge sets this result; only the latest waiter is kept."""
        self._waiter = waiter

    async def ready(self) -> None:
        """Returns when there is something to take, or after a nudge. Cancelling it changes nothing."""
        await first_ready([self])

    def take(self) -> list[TokenEvent]:
        """All events that have come; a consumer that was slow catches up at once."""
        events = list(self._events)
        self._events.clear()
        if events and events[-1].finish_reason is not None:
            self.finished = True
        return events

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.finished:
            raise StopAsyncIteration
        try:
            while not self._events:
                await self.ready()
        except asyncio.CancelledError:  # the consumer has left
            self.abort()
            raise
        event = self._events.popleft()
        self.finished = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.finished:
            self.finished = True
            self._engine.abort(self.id)

    def end(self, reason: FinishReason) -> None:
        """The consumer needs no more tokens; the final event still comes, with this reason."""
        self._engine.abort(self.id, reason)

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


async def first_ready(streams: Sequence[TokenStream]) -> None:
    """Returns when one of them has something to take, or was nudged. Cancelling it changes nothing."""
    if not any(stream.has_events for stream in streams):
        waiter = asyncio.get_running_loop().create_future()
        for stream in streams:
            stream.wake(waiter)
        await waiter


class AsyncEngine:
    """Wraps an engine that was not started yet. All methods but those of the engine belong to one loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[tuple[TokenStream, TokenEvent]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._awake = False  # the loop will look at the pending events without being woken
        self._urgent = False  # among them are some that do not wait until it does
        engine.on_delivered = self._wake

    def attach(self) -> None:
        """Events go to the running loop from now on. For callers that start the engine themselves."""
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        self.attach()
        await asyncio.to_thread(self.engine.start)

    def submit(self, prompt_tokens: Iterable[int], params: SamplingParams) -> TokenStream:
        """Raises RequestError or EngineDead at once."""
        return self.submit_many(prompt_tokens, params, 1)[0]

    def submit_many(
        self,
        prompt_tokens: Iterable[int],
        params: SamplingParams,
        n: int,
        client: str = "",
        cache: PromptCache = DEFAULT_CACHE,
    ) -> list[TokenStream]:
        """``n`` answers to one prompt, which is computed once. Leaving one of them does not touch the others."""
        streams = [TokenStream(self.engine) for _ in range(n)]
        sinks = [partial(self._put, stream) for stream in streams]
        ids = self.engine.submit_many(prompt_tokens, params, sinks, client, cache)
        for stream, request_id in zip(streams, ids, strict=True):
            stream.id = request_id
        return streams

    def abort(self, request_id: str) -> None:
        """The stream then ends with a final event of its own."""
        self.engine.abort(request_id)

    def snapshot(self) -> StatsSnapshot:
        return self.engine.snapshot()

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)

    def _put(self, stream: TokenStream, event: TokenEvent) -> None:
        """Engine thread."""
        self._urgent |= not stream.started or event.finish_reason is not None
        stream.started = True
        self._pending.append((stream, event))

    def _wake(self) -> None:
        """Engine thread. The loop may be gone when the process ends; then nothing is left to wake."""
        assert self._loop is not None
        if self._urgent or not self._awake:
            self._urgent, self._awake = False, True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._spread)

    def _spread(self) -> None:
        """Looks again after a rest; once nothing came meanwhile, the engine has to wake it."""
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending:
            self._awake = False
        if self._pending:  # asked again: the engine may have believed us awake a moment ago
            self._awake = True
            while self._pending:
                stream, event = self._pending.popleft()
                stream.put(event)
            self._timer = self._loop.call_later(REST_SECONDS, self._spread)
