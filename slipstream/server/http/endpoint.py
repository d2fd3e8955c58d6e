"""Endpoints on bare ASGI. GenerateEndpoint serves every protocol: read, check, generate, write."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from slipstream.errors import SlipstreamError
from slipstream.server.errors import ApiError, ClientDisconnected, to_api_error
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
from slipstream.server.protocols.api_protocol import ApiProtocol, ApiWriter
from slipstream.server.protocols.body import parse
from slipstream.server.protocols.fields import SamplingFields
from slipstream.server.service.choice import ChoiceDelta
from slipstream.server.service.generation import Generation
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.service import SMALL_BODY, Service
from slipstream.server.service.timings import Finish

R = TypeVar("R", bound=SamplingFields)
B = TypeVar("B", bound=BaseModel)


class PostEndpoint(ABC, Generic[B]):
    """A JSON body in, a response out. The work is cancelled when the client disconnects."""

    def __init__(self, service: Service, request_model: type[B]) -> None:
        self.service = service
        self.request_model = request_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_json(scope, receive, self.service.config)
            await while_connected(receive, self._run(body, send))
        except ClientDisconnected:
            return
        except SlipstreamError as error:
            await send_error(scope, send, to_api_error(error))

    async def _run(self, body: bytes, send: Send) -> None:
        request = await self._parse(body)
        check_model(self.service, getattr(request, "model", None))
        await self.answer(request, send)

    async def _parse(self, body: bytes) -> B:
        depth = self.service.config.max_json_depth
        if len(body) <= SMALL_BODY:
            return parse(self.request_model, body, depth)
        return await self.service.in_thread(lambda: parse(self.request_model, body, depth))

    @abstractmethod
    async def answer(self, request: B, send: Send) -> None: ...


class JsonEndpoint(PostEndpoint[B]):
    """A response that needs no generation."""

    def __init__(self, service: Service, request_model: type[B], work: Callable[[Service, B], Awaitable[Any]]) -> None:
        super().__init__(service, request_model)
        self._work = work

    async def answer(self, request: B, send: Send) -> None:
        async with self.service.admitted():
            found = await self._work(self.service, request)
        await send_json(send, found)


class GenerateEndpoint(PostEndpoint[R]):
    def __init__(self, service: Service, protocol: ApiProtocol[R]) -> None:
        super().__init__(service, protocol.request_model)
        self._protocol = protocol

    async def answer(self, request: R, send: Send) -> None:
        model = request.model or self.service.loaded().facts.name
        writer = self._protocol.writer(request, model)
        generation_request = self._protocol.to_generation_request(request, self.service.engine_config)
        if request.stream:
            await self._stream(generation_request, writer, EventStream(send))
            return
        async with self.service.generation(generation_request) as generation:
            choices = await generation.whole()
        assert generation.total is not None
        await send_json(send, writer.whole(choices, generation.total))

    async def _stream(self, request: GenerationRequest, writer: ApiWriter, events: EventStream) -> None:
        """An error before the first event becomes an HTTP error; a later one becomes an event of the stream."""
        try:
            while not await self.service.holder.awake(self.service.config.keep_alive_seconds):
                await events.write(writer.keep_alive)
            async with self.service.generation(request) as generation:
                await self._write_events(generation, writer, events)
        except SlipstreamError as error:
            if not events.started:
                raise
            await events.write(writer.failure(to_api_error(error)))
        await events.end()

    async def _write_events(self, generation: Generation, writer: ApiWriter, events: EventStream) -> None:
        opening = writer.opening(generation.num_prompt)
        with Heartbeat(generation, self.service.config.keep_alive_seconds) as heartbeat:
            while generation.total is None:
                deltas = await generation.next()
                text = "".join(_event_text(writer, delta, generation.total, delta is deltas[-1]) for delta in deltas)
                await events.write(opening + (text if deltas else writer.keep_alive))
                opening = ""
                heartbeat.num_writes += 1


def _event_text(writer: ApiWriter, delta: ChoiceDelta, total: Finish | None, last: bool) -> str:
    text = writer.delta(delta) if delta.parts else ""
    return text if delta.finish is None else text + writer.ended(delta.index, delta.finish, total if last else None)


class Heartbeat:
    """Wakes a generation after some silence, so that a keep-alive is sent. One timer a stream, not one a token."""

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
