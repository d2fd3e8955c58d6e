"""The server's start and shutdown: bind, listen, load, serve, drain; or fail with an error.

The port is open while the model loads (/health is 200, /ready is 503) and while it sleeps (both are 200). SIGTERM and
SIGINT drain; a second signal exits without waiting. An engine failure ends the process with exit code 1.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable, Coroutine
from types import FrameType

import uvicorn

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.host import allow_open_files
from slipstream.server.http.app import make_app
from slipstream.server.http.connection import BoundedConnection, connection_class
from slipstream.server.service.model_holder import Load, LoadedModel, as_load_error
from slipstream.server.service.service import Service
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import SAMPLE_SECONDS

SWITCH_SECONDS = 0.001  # the engine thread must not wait long for the GIL while the event loop writes to clients
BACKLOG = 1024
SEND_BUFFER = 64 << 10  # bytes
CLOSE_SECONDS = 2.0  # for clients to read the rest of their response

log = logging.getLogger("slipstream.server")


def bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by connections. The default would buffer megabytes for a client that does not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        taken = "; another --port may be free, and 0 takes any" if error.errno == errno.EADDRINUSE else ""
        why = f"{error.strerror or error}{taken}"
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {why}") from error
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{shown_host(host)}:{port}/"


def shown_host(host: str) -> str:
    """As a browser on this machine spells it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if installed: time spent on writing to clients is taken from the engine."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Uvicorn(uvicorn.Server):
    """Passes signals to us: uvicorn would close the port at once and then re-raise the signal."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()


class Server:
    """`run` serves until `stop` or a signal. `error`: the exception that ended it, if any."""

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        load: Load,
        on_ready: Callable[[LoadedModel], None] = lambda loaded: None,
    ) -> None:
        self.listener = bind(config)
        self.error: BaseException | None = None
        self._config, self._engine_config = config, engine_config
        self._load, self._on_ready = load, on_ready
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return address(self.listener)

    def run(self) -> None:
        """Blocks until the server has shut down. In any thread, but signals are handled in the main thread only."""
        sys.setswitchinterval(SWITCH_SECONDS)
        allow_open_files(2 * self._config.max_connections)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = Service(self._config, self._engine_config)
        self._uvicorn = _Uvicorn(self._uvicorn_config(), self._signalled)
        tasks = [asyncio.create_task(work()) for work in (self._load_model, self._sample)]
        try:
            await self._uvicorn.serve(sockets=[self.listener])
        finally:
            for task in tasks:
                task.cancel()
            await self._service.close()

    def stop(self) -> None:
        """Starts to drain. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._begin, self._drain)

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            make_app(self._service),
            http=connection_class(self._config),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=30,
        )

    # The engine thread.

    def _engine_died(self, error: Exception) -> None:
        log.error("the engine failed", exc_info=error)
        self._call(self._on_engine_failure, error)

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *arguments)

    # The event loop.

    async def _load_model(self) -> None:
        try:
            await self._service.load(self._load, self._engine_died, self._on_ready)
        except Exception as error:  # any exception must end the process, not only this task
            self._end(as_load_error(error))

    def _signalled(self) -> None:
        """A signal handler: runs in the main thread."""
        if self._tasks or self._service.monitor.state == "loading":
            self._loop.call_soon_threadsafe(self._exit, 0.0)
        else:
            self.stop()

    def _begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._tasks.add(asyncio.create_task(work()))

    async def _drain(self) -> None:
        if count := self._service.num_generations:
            answers = f"{count} answer{'s' if count > 1 else ''}"
            seconds = self._config.drain_seconds
            log.info("ending: %s may take %g s more; a second signal cuts them off", answers, seconds)
        await self._service.drain()
        self._exit()

    def _on_engine_failure(self, error: Exception) -> None:
        self.error = error
        self._service.monitor.state = "failed"
        self._begin(self._exit_after_failure)

    async def _exit_after_failure(self) -> None:
        await self._service.fail()
        self._exit()

    def _end(self, error: BaseException) -> None:
        """Loading failed; no request was admitted yet."""
        self.error = error
        self._exit()

    def _exit(self, close_seconds: float = CLOSE_SECONDS) -> None:
        self._uvicorn.should_exit = True
        self._loop.call_later(close_seconds, self._abort_connections)

    def _abort_connections(self) -> None:
        """Closes connections that have not read their response: uvicorn would wait for them for ever."""
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()

    async def _sample(self) -> None:
        while True:
            self._service.monitor.sample()
            for connection in list(self._uvicorn.server_state.connections):
                assert isinstance(connection, BoundedConnection)
                connection.check()
            await asyncio.sleep(SAMPLE_SECONDS)
