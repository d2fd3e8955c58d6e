"""Endpoints on bare ASGI. GenerateEndpoint serves every protocol: read, check, generate, write."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from slipstream.errors import SlipstreamError
from slipstream.server.errors import ApiError, ClientDisconnected, to_api_error
from slipstream.server.http.cors import check_content_type
from slipstream.server.http.wire import (
    EventStream,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
    while_connected,
)
from slipstream.server.protocols.api_protocol import ApiProtocol, ApiWriter, with_warnings
from slipstream.server.protocols.body import JsonLimits, Unknown, parse
from slipstream.server.protocols.fields import SamplingFields
from slipstream.server.service.caller import caller
from slipstream.server.service.choice import ChoiceDelta
from slipstream.server.service.generation import Generation
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.service import SMALL_BODY, Service
from slipstream.server.service.timings import Finish

MAX_WARNINGS = 16  # about unknown fields
R = TypeVar("R", bound=SamplingFields)
B = TypeVar("B", bound=BaseModel)


class PostEndpoint(ABC, Generic[B]):
    """A JSON body in, a response out. The work is cancelled when the client disconnects."""

    stream_type: str | None = None  # the content type of its streams, if it has any

    def __init__(self, service: Service, request_model: type[B]) -> None:
        self.service = service
        self.request_model = request_model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self.service.config
        try:
            check_content_type(scope, config.cors_origins)
            body = await read_body(scope, receive, config.max_body, config.body_seconds)
            await while_connected(receive, self._run(body, send))
        except ClientDisconnected:
            return
        except SlipstreamError as error:
            await send_error(scope, send, to_api_error(error))

    async def _run(self, body: bytes, send: Send) -> None:
        request, unknown = await self._parse(body)
        check_model(self.service, getattr(request, "model", None))
        self.service.metrics.unknown_fields.inc(len(unknown))
        await self.answer(request, unknown_warnings(unknown), send)

    async def _parse(self, body: bytes) -> tuple[B, list[Unknown]]:
        config, context = self.service.config, self.service.loaded().engine.info.max_context
        limits = JsonLimits.for_context(config.max_json_depth, context)
        if len(body) <= SMALL_BODY:
            return parse(self.request_model, body, limits, config.strict)
        return await self.service.in_thread(lambda: parse(self.request_model, body, limits, config.strict))

    @abstractmethod
    async def answer(self, request: B, warnings: list[str], send: Send) -> None: ...


class JsonEndpoint(PostEndpoint[B]):
    """A response that needs no generation."""

    def __init__(
        self, service: Service, request_model: type[B], work: Callable[[Service, B], Awaitable[dict[str, Any]]]
    ) -> None:
        super().__init__(service, request_model)
        self._work = work

    async def answer(self, request: B, warnings: list[str], send: Send) -> None:
        async with self.service.admitted():
            found = await self._work(self.service, request)
        await send_json(send, found | with_warnings(warnings))


class GenerateEndpoint(PostEndpoint[R]):
    def __init__(self, service: Service, protocol: ApiProtocol[R]) -> None:
        super().__init__(service, protocol.request_model)
        self._protocol = protocol
        self.stream_type = protocol.stream_type

    async def answer(self, request: R, warnings: list[str], send: Send) -> None:
        model = request.model or self.service.loaded().facts.name
        writer = self._protocol.writer(request, model)
        if (known := writer.without_generation()) is not None:
            await send_json(send, known)
            return
        generation_request = self._protocol.to_generation_request(request, self.service.engine_config)
        if request.stream:
            events = EventStream(send, self._protocol.stream_type)
            await self._stream(generation_request, warnings, writer, events)
            return
        async with self.service.generation(generation_request) as generation:
            _begin(writer, generation, generation_request, warnings)
            choices = await generation.whole()
        assert generation.total is not None
        await send_json(send, writer.whole(choices, generation.total))

    async def _stream(
        self, request: GenerationRequest, warnings: list[str], writer: ApiWriter, events: EventStream
    ) -> None:
        """An error before the first event becomes an HTTP error; a later one becomes an event of the stream."""
        try:
            while not await self.service.holder.awake(self.service.config.keep_alive_seconds):
                await events.write(writer.keep_alive)
            async with self.service.generation(request) as generation:
                _begin(writer, generation, request, warnings)
                await self._write_events(generation, writer, events)
        except SlipstreamError as error:
            if not events.started:
                raise
            caller().error = to_api_error(error).message
            await events.write(writer.failure(to_api_error(error)))
        await events.end()

    async def _write_events(self, generation: Generation, writer: ApiWriter, events: EventStream) -> None:
        opened = False
        with Heartbeat(generation, self.service.config.keep_alive_seconds) as heartbeat:
            while generation.total is None:
                deltas = await generation.next()
                opening = "" if opened else writer.opening(generation.num_prompt, generation.num_cached)
                text = "".join(_event_text(writer, delta, generation.total, delta is deltas[-1]) for delta in deltas)
                await events.write(opening + (text if deltas else writer.keep_alive))
                opened = True
                heartbeat.num_writes += 1


def _begin(writer: ApiWriter, generation: Generation, request: GenerationRequest, warnings: list[str]) -> None:
    writer.prompts, writer.params = generation.prompts, request.params
    writer.warnings = [*warnings, *generation.warnings]


def _event_text(writer: ApiWriter, delta: ChoiceDelta, total: Finish | None, last: bool) -> str:
    text = writer.delta(delta) if delta.parts or delta.tokens else ""
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
    """Any name will do, unless the server was given the names to insist on."""
    names = service.config.names
    name = name.removesuffix(":latest") if name else name  # which Ollama's clients append
    known = (service.loaded().facts.name, *names)
    if name and names and name not in known:
        raise unknown_model(name, known)


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    message = f"there is no model {name!r} here; this server has {', '.join(map(repr, dict.fromkeys(known)))}"
    return ApiError(404, message, param="model", code="model_not_found")


def unknown_warnings(unknown: list[Unknown]) -> list[str]:
    named = [f"{each.sentence}: it was ignored" for each in unknown[:MAX_WARNINGS]]
    more = len(unknown) - len(named)
    return [*named, f"{more} more fields were ignored"] if more else named
