"""A cluster of one machine that this process starts and ends, with the application on it."""

from __future__ import annotations

import time

import ray
from ray import serve
from ray.exceptions import RayActorError

from slipstream.ray.application import application
from slipstream.ray.proxy import start_proxy
from slipstream.ray.settings import Settings
from slipstream.server.service.model_holder import Load
from slipstream.server.service.settings import is_loopback

APPLICATION = "slipstream"
LOOPBACK = "127.0.0.1"


def start(settings: Settings, load: Load | None = None) -> None:
    """Returns when the replicas are ready. Raises RuntimeError, with Ray's words, if they cannot be started."""
    local = {"_node_ip_address": LOOPBACK} if is_loopback(settings.server.host) else {}
    ray.init("local", include_dashboard=False, **local)
    start_proxy(serve, (TimeoutError, RayActorError), {"host": settings.server.host, "port": settings.server.port})
    deploy(settings, load)


def deploy(settings: Settings, load: Load | None = None) -> None:
    """Again with other settings: Ray replaces or moves what has changed."""
    serve.run(application(settings, load), name=APPLICATION, route_prefix="/")


def drain(settings: Settings) -> None:
    """Removes the application while the proxy still carries the answers that are being written."""
    serve.delete(APPLICATION, _blocking=False)
    deadline = time.monotonic() + 2 * settings.shutdown_seconds  # Ray itself ends what takes longer than half of it
    while APPLICATION in serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.2)


def end() -> None:
    serve.shutdown()
    ray.shutdown()
