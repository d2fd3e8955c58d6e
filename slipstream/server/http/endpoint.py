"""Endpoints on bare ASGI. One of them drives every protocol: read, check, generate, tell; streamed or whole."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from slipstream.errors import SlipstreamError
from slipstream.server.errors import ApiError, ClientLeft, told
from slipstream.server.http.wire import (
    EventStream,
    Receive,
    Scope,
    Send,
    read_json,
    send_error,
    send_json,
    while_connected,
)
from slipstream.server.protocols.api_protocol import Protocol, Writer
from slipstream.server.protocols.body import parse
from slipstream.server.protocols.fields import Sampled
from slipstream.server.service.choice import Delta
from slipstream.server.service.generation import Generation
from slipstream.server.service.service import SMALL_BODY, Service
from slipstream.server.service.timings import Finish

R = TypeVar("R", bound=Sampled)
B = TypeVar("B", bound=BaseModel)


class Post(ABC, Generic[B]):
    """A JSON body in, an answer out. The work is cancelled when the client leaves."""

    def __init__(self, service: Service, request: type[B]) -> None:
        self.service = service
        self.request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_json(scope, receive, self.service.config)
            await while_connected(receive, self._run(body, send))
        except ClientLeft:
            return
        except SlipstreamError as error:
            await send_error(scope, send, told(error))

    async def _run(self, body: bytes, send: Send) -> None:
        asked = await self._parse(body)
        check_model(self.service, getattr(asked, "model", None))
        await self.answer(asked, send)

    async def _parse(self, body: bytes) -> B:
        depth = self.service.config.max_json_depth
        if len(body) <= SMALL_BODY:
            return parse(self.request, body, depth)
        return await self.service.in_thread(lambda: parse(self.request, body, depth))

    @abstractmethod
    async def answer(self, asked: B, send: Send) -> None: ...


class Ask(Post[B]):
    """An answer that needs no generation."""

    def __init__(self, service: Service, request: type[B], work: Callable[[Service, B], Awaitable[Any]]) -> None:
        super().__init__(service, request)
        self._work = work

    async def answer(self, asked: B, send: Send) -> None:
        async with self.service.admitted():
            found = await self._work(self.service, asked)
        await send_json(send, found)


class Generate(Post[R]):
    def __init__(self, service: Service, protocol: Protocol[R]) -> None:
        super().__init__(service, protocol.request)
        self._protocol = protocol

    async def answer(self, asked: R, send: Send) -> None:
        model = asked.model or self.service.loaded().facts.name
        writer = self._protocol.writer(asked, model)
        job = self._protocol.job(asked, self.service.engine_config)
        async with self.service.generation(job) as generation:
            if asked.stream:
                await self._stream(generation, writer, EventStream(send))
                return
            answers = await generation.whole()
        assert generation.total is not None
        await send_json(send, writer.whole(answers, generation.total))

    async def _stream(self, generation: Generation, writer: Writer, events: EventStream) -> None:
        """An error before the first event is an HTTP error; later ones can only be told inside the stream."""
        try:
            await self._tell(generation, writer, events)
        except SlipstreamError as error:
            if not events.started:
                raise
            await events.write(writer.failure(told(error)))
        await events.end()

    async def _tell(self, generation: Generation, writer: Writer, events: EventStream) -> None:
        opening = writer.opening(generation.num_prompt)
        with Heartbeat(generation, self.service.config.keep_alive_seconds) as heart:
            while generation.total is None:
                deltas = await generation.next()
                text = "".join(_told(writer, delta, generation.total, delta is deltas[-1]) for delta in deltas)
                await events.write(opening + (text if deltas else writer.keep_alive))
                opening = ""
                heart.num_writes += 1


def _told(writer: Writer, delta: Delta, total: Finish | None, last: bool) -> str:
    text = writer.delta(delta) if delta.parts else ""
    return text if delta.finish is None else text + writer.ended(delta.index, delta.finish, total if last else None)


class Heartbeat:
    """Nudges a generation whose client has heard nothing for a while. One timer a stream: tokens do not touch it."""

    def __init__(self, generation: Generation, seconds: float) -> None:
        self.num_writes = 0
        self._generation, self._seconds = generation, seconds

    def __enter__(self) -> Heartbeat:
        self._schedule()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._beat, self.num_writes)

    def _beat(self, num_writes: int) -> None:
        if num_writes == self.num_writes:
            self._generation.nudge()
        self._schedule()


def check_model(service: Service, name: str | None) -> None:
    known = (service.loaded().facts.name, *service.config.names)
    if name is not None and name not in known:
        raise ApiError(
            404, f"there is no model {name!r} here; this server has {known[0]!r}", param="model", code="model_not_found"
        )
