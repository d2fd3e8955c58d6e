"""Puts replicas and routers together into an application of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from slipstream.ray.environment import uses_haproxy
from slipstream.ray.replica import Replica
from slipstream.ray.router import AffinityRouter, Router
from slipstream.ray.settings import Settings
from slipstream.server.service.model_holder import Load

DEPLOYMENT = "slipstream"
ROUTERS = "router"
HEALTH_SECONDS = 2.0
STATS_SECONDS = 1.0  # how old a router's view of the replicas' queues may be


def application(settings: Settings, load: Load | None = None) -> Application:
    """``load``: instead of the model of the settings; it travels to the replicas."""
    replicas = _replicas(settings).bind(settings.model, settings.server, settings.num_cores, load)
    if settings.replicas.routes and uses_haproxy():
        # Ray's own hook for HAProxy to ask who is to answer; it is not part of Ray's stable interface.
        return replicas._with_ingress_request_router(_routers(settings).bind(replicas))
    return replicas


def _replicas(settings: Settings) -> Deployment:
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "max_ongoing_requests": settings.max_ongoing,
        "graceful_shutdown_timeout_s": settings.shutdown_seconds,
        "graceful_shutdown_wait_loop_s": 1.0,
        "health_check_period_s": HEALTH_SECONDS,
        "ray_actor_options": _resources(settings),
        **_scale(settings),
    }
    if settings.replicas.routes:
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=AffinityRouter, request_routing_stats_period_s=STATS_SECONDS
        )
    return serve.deployment(serve.ingress()(Replica)).options(**options)


def _scale(settings: Settings) -> dict[str, Any]:
    own = settings.replicas
    if not own.autoscales:
        return {"num_replicas": own.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=1 if own.min_replicas is None else own.min_replicas,
            max_replicas=own.most,
            target_ongoing_requests=settings.model.max_streams,
        )
    }


def _resources(settings: Settings) -> dict[str, Any]:
    """A replica on a GPU computes there; one on a CPU counts for the cores that it keeps to."""
    return {"num_gpus": settings.num_gpus, "num_cpus": settings.replicas.cpus_per_replica or 1}


def _routers(settings: Settings) -> Deployment:
    """Ray starts one on each machine with a proxy. They take no core in its count: a request is little work."""
    deployment = serve.deployment(serve.ingress()(Router))
    return deployment.options(
        name=ROUTERS,
        max_ongoing_requests=settings.max_ongoing * settings.replicas.most,
        ray_actor_options={"num_cpus": 0},
    )
