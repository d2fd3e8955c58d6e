"""Reads bodies and sends responses on bare ASGI. Limits are enforced before anything is parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from slipstream.server.errors import ApiError, ClientDisconnected, error_body
from slipstream.server.service.caller import caller
from slipstream.server.text.json_text import compact

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name, or None."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, limit: int, seconds: float) -> bytes:
    """The unparsed body of a request within the size and time limits."""
    try:
        async with asyncio.timeout(seconds):
            return await _read_body(scope, receive, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", close=True) from None


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", close=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. If the client disconnects first, the work is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, value: object, status: int = 200, headers: Headers | None = None) -> None:
    await send_bytes(send, compact(value).encode("utf-8", "replace"), b"application/json", status, headers)


async def send_bytes(send: Send, body: bytes, kind: bytes, status: int = 200, headers: Headers | None = None) -> None:
    fields = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_empty(send: Send, status: int, headers: Headers) -> None:
    length = [] if status == 204 else [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": [*length, *headers]})
    await send({"type": "http.response.body", "body": b""})


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    caller().error = error.message
    await send_json(send, error_body(error, scope["path"]), error.status, error.headers)


class EventStream:
    """Events of a content type. Status and headers are sent with the first event."""

    def __init__(self, send: Send, content_type: str) -> None:
        self._send = send
        self._head: Headers = [
            (b"content-type", f"{content_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self.started = False

    async def write(self, text: str) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._head})
        await self._send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
