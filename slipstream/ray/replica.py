"""A replica: the server's ASGI application over an engine of its own, as an actor of Ray Serve.

Ray counts it as started when its model is loaded, replaces it when its engine fails, and before it removes it waits
until its requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

from prometheus_client.exposition import generate_latest
from ray import serve
from ray.serve.handle import DeploymentHandle

from slipstream.commands.options import ModelOptions
from slipstream.commands.serve import Loading
from slipstream.host import allow_open_files
from slipstream.ray.metrics import by_replica, summed
from slipstream.ray.status import merged_status
from slipstream.server.http.app import make_app
from slipstream.server.http.lifecycle import SWITCH_SECONDS
from slipstream.server.http.logs import set_up_logging
from slipstream.server.http.wire import Message, Receive, Scope, Send
from slipstream.server.service.model_holder import Load, LoadedModel, as_load_error
from slipstream.server.service.service import Service
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import SAMPLE_SECONDS

REPLICA_HEADER = b"x-slipstream-replica"
ANSWER_SECONDS = 5.0  # for the other replicas to answer
log = logging.getLogger("slipstream.ray")


class Replica:
    """Everything runs on the event loop that Ray gives it."""

    def __init__(
        self, model: ModelOptions, server: ServerConfig, num_cores: int | None = None, load: Load | None = None
    ) -> None:
        """``num_cores``: it keeps to so many. ``load``: instead of the model of the options.

        Nothing here says how many replicas there are: Ray replaces all of them when an argument changes.
        """
        context = serve.get_replica_context()
        self._id = context.replica_tag
        self._replicas = serve.get_deployment_handle(context.deployment, context.app_name)
        with redirect_stderr(sys.__stderr__):  # Ray's own goes to a file, and for long stays in memory
            set_up_logging(server.log_level, server.log_format)
        sys.setswitchinterval(SWITCH_SECONDS)
        allow_open_files(2 * server.max_connections)
        if num_cores is not None:
            keep_to_cores(context.rank.local_rank, num_cores)
        self._loop = asyncio.get_running_loop()
        self._service = Service(server, model.engine_config)
        self._loading = load or Loading(model, say=log.info)
        self._failure: Exception | None = None
        self._sampling: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ReplicaApp:
        """Loads the model first: Ray asks for the application before it calls the replica started."""
        try:
            await self._service.load(self._loading, self._engine_died, self._ready)
        except Exception as error:
            raise as_load_error(error) from error
        self._sampling = asyncio.create_task(self._sample())
        return ReplicaApp(make_app(self._service, reports=AllReplicas(self, self._replicas)), self._id)

    def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure}")

    def record_routing_stats(self) -> dict[str, int]:
        seen = self._service.monitor.snapshot()
        streams = self._service.engine_config.max_streams
        return {"running": seen.num_running, "waiting": seen.num_waiting, "streams": streams}

    def own_metrics(self) -> tuple[str, str]:
        """With the replica's name: for any of them to report all."""
        return self._id, generate_latest(self._service.metrics.registry).decode()

    def own_status(self) -> tuple[str, dict[str, Any]]:
        return self._id, self._service.monitor.report()

    async def __del__(self) -> None:
        """After Ray has waited for the requests."""
        if self._sampling is not None:
            self._sampling.cancel()
            await self._service.drain()
        await self._service.close()

    def _ready(self, loaded: LoadedModel) -> None:
        if isinstance(self._loading, Loading):
            self._loading.ready(loaded, f"replica {self._id}")

    def _engine_died(self, error: Exception) -> None:
        """In the engine's thread."""
        log.error("the engine failed", exc_info=error)
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._service.monitor.state = "failed"

    async def _sample(self) -> None:
        while True:
            self._service.monitor.sample()
            await asyncio.sleep(SAMPLE_SECONDS)


class AllReplicas:
    """What /metrics and /v1/status say, asked of all replicas."""

    def __init__(self, own: Replica, replicas: DeploymentHandle) -> None:
        self._own, self._replicas = own, replicas

    async def metrics(self, query: Mapping[str, str]) -> bytes:
        texts = dict([*await self._ask("own_metrics"), self._own.own_metrics()])
        return summed(texts) if "sum" in query else by_replica(texts)

    async def status(self) -> dict[str, Any]:
        return merged_status(dict([*await self._ask("own_status"), self._own.own_status()]))

    async def _ask(self, method: str) -> list[tuple[str, Any]]:
        call = self._replicas.broadcast(method)
        found = await call.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        return [each for each in found if isinstance(each, tuple)]  # some may have left just now


class ReplicaApp:
    """The server's application, with the replica's name in every response."""

    def __init__(self, app: Any, replica: str) -> None:
        self._app, self._replica = app, replica.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [each for each in message.get("headers", []) if each[0] != b"x-request-id"]  # Ray adds it, too
                message["headers"] = [*own, (REPLICA_HEADER, self._replica)]
            await send(message)

        await self._app(scope, receive, named)


def keep_to_cores(rank: int, count: int) -> None:
    """The calling thread, and those that it starts. ``rank``: of the replica among those of this machine."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(rank * count + index) % len(cores)] for index in range(min(count, len(cores)))})
