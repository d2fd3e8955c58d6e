"""uvicorn's HTTP/1.1 connection with limits: on a request's head, on connections, and on clients that do not read.

A client may close its side after its request and still read the answer. Whether it is there at all shows only when
bytes are sent to it: the system of a client that is gone answers them with a reset.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any, ClassVar
from urllib.parse import urlsplit

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from slipstream.server.errors import ApiError, openai_error
from slipstream.server.http.access import new_request_id
from slipstream.server.http.logs import Seldom
from slipstream.server.service.settings import ServerConfig

MAX_HEAD = 32 << 10  # bytes
HEAD_SECONDS = 20.0
RESET_SECONDS = 0.1  # for a reset to come back
REFUSED_SECONDS = 2.0  # for a client beyond the limit to send its request and read the refusal
MAX_REFUSED = 256  # such clients at once; further ones are cut off
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("slipstream.connections")


class BoundedConnection(HttpToolsProtocol):
    """The event loop calls everything; `check` is to be called about twice a second."""

    settings: ClassVar[ServerConfig]
    refused: ClassVar[set[RefusedConnection]]
    warnings: ClassVar[Seldom]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head = 0  # bytes since the last request's head was complete
        self._head_size = 0  # bytes of the head so far, as the parser reports them
        self._in_body = False
        self._timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None  # the request that is answered now, or was last
        self._half_closed = False
        self._probed_at = 0.0
        self._num_unsent = 0  # bytes at the last check
        self._moved_at = self.loop.time()  # when it was seen to send bytes, or to have none to send

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.settings.max_connections:
            self._refuse_connection(transport)
            return
        super().connection_made(transport)
        self._await_head()

    def _refuse_connection(self, transport: asyncio.Transport) -> None:
        self.warnings.warn(f"more than {self.settings.max_connections} connections: see --max-connections")
        if len(self.refused) < MAX_REFUSED:
            transport.set_protocol(RefusedConnection(transport, self.loop, self.refused))
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # also where a request after it came in already
            self._answering.message_event.set()
        super().connection_lost(exc)

    # The request.

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._num_head += len(data)
            if self._timer is None:
                self._await_head()
        super().data_received(data)
        if not self._in_body and self._num_head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        """The parser ends at an exception, and the client gets 400."""
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise ValueError("the head is too large")

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_body, self._num_head = True, 0
        named = b"" if self.url.startswith(b"/") else urlsplit(self.url).netloc
        if named and (b"host", named) not in self.headers:
            self.headers.append((b"host", named))  # an absolute URI names a host, too: security.py takes only one
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no request. uvicorn calls it, too."""
        if self._is_answering and self._answering is not None and self._answering.response_started:
            self.transport.close()  # a second status line would land in the middle of the answer
            return
        too_large = max(self._num_head, self._head_size) > MAX_HEAD
        text = f"the request's head is larger than {MAX_HEAD} bytes" if too_large else "this is not HTTP/1.1"
        self.warnings.warn(f"{self.client[0] if self.client else 'a client'}: {text} (this server speaks no TLS)")
        self.transport.write(plain_refusal(ApiError(400, text, close=True)))
        self.transport.close()

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.close()

    # The answer.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self._is_answering:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the connection stays open for the answer."""
        if self._in_body or not self._is_answering:
            return False
        self._half_closed = True
        self._probe()
        return True

    def _probe(self) -> None:
        """An interim response may come any time before the response. In a stream, the next event is the probe."""
        assert self._answering is not None
        self._probed_at = self.loop.time()
        if not self._answering.response_started and self._answering.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self.loop.call_later(RESET_SECONDS, self.check)

    def check(self) -> None:
        """Ends a connection whose client is gone, or has not read for too long."""
        if self._half_closed and not self.transport.is_closing():
            self._check_reset()
        if self in self.connections:
            self._check_reading()

    def _check_reset(self) -> None:
        own = self.transport.get_extra_info("socket")
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif self._is_answering and self.loop.time() - self._probed_at > self.settings.keep_alive_seconds:
            self._probe()

    def _check_reading(self) -> None:
        num_unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        may_grow = self._is_answering and not self.flow.write_paused
        if not num_unsent or num_unsent < self._num_unsent or may_grow:
            self._moved_at = now
        self._num_unsent = num_unsent
        if now - self._moved_at > self.settings.write_seconds:
            log.warning(
                "%s has read nothing for %g s: connection closed",
                self.client[0] if self.client else "a client",
                self.settings.write_seconds,
            )
            self.transport.abort()


class RefusedConnection(asyncio.Protocol):
    """One beyond the limit: 503 to whatever it sends."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, peers: set[RefusedConnection]
    ) -> None:
        self._transport, self._peers = transport, peers
        self._answered = False
        self._timer = loop.call_later(REFUSED_SECONDS, transport.abort)
        peers.add(self)

    def data_received(self, data: bytes) -> None:
        """The rest of the request is read, too: to close before that would be a reset, and the answer lost."""
        if not self._answered:
            self._answered = True
            self._transport.write(plain_refusal(ApiError(503, "too many connections", retry_after=5, close=True)))
            self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._peers.discard(self)


def connection_class(config: ServerConfig) -> type[BoundedConnection]:
    """For one server."""

    class Connection(BoundedConnection):
        settings = config
        refused: ClassVar[set[RefusedConnection]] = set()
        warnings = Seldom(log)

    return Connection


def plain_refusal(error: ApiError) -> bytes:
    """A whole response, for requests that do not reach the application."""
    body = json.dumps(openai_error(error)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", new_request_id().encode()),
        *error.headers,
    ]
    return STATUS_LINE[error.status] + b"".join(b"%s: %s\r\n" % each for each in headers) + b"\r\n" + body
