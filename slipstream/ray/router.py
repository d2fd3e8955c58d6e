"""Which replica a request goes to: the one that had its conversation before.

HAProxy asks a router, once a request, for the name of a replica, and then talks to that replica directly. Replicas are
found by consistent hashing, so that one more or one less moves few conversations.
"""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slipstream.ray.affinity import SESSION_HEADER, session_key

ROUTE = "/internal/route"  # where Ray's HAProxy asks
ALL = 1 << 20  # replicas that may stand in for the first


class AffinityRouter(ConsistentHashRouter):
    """By conversation, but past a replica with a queue while another has none."""

    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(num_fallback_replicas=ALL, **settings)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or len(ranks) < 2:
            return ranks
        if pending_request.metadata.session_id:
            return sorted(ranks, key=lambda rank: is_full(rank[0].routing_stats))
        first, second, *others = ranks  # of nobody's conversation: their order is random
        return [*sorted((first, second), key=lambda rank: load(rank[0].routing_stats)), *others]


def is_full(stats: dict[str, Any]) -> bool:
    """Some of its requests wait for others to end."""
    return "streams" in stats and load(stats) > stats["streams"]


def load(stats: dict[str, Any]) -> int:
    return int(stats.get("running", 0)) + int(stats.get("waiting", 0))


class Router:
    """An actor of Ray Serve, beside the replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._replicas._init()

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route(ROUTE, self._route, methods=["POST"])])

    async def _route(self, request: Request) -> Response:
        """The answer's form is Ray's: its HAProxy takes the replica's name out of it."""
        key = session_key(request.headers.get(SESSION_HEADER), await request.body())
        replicas = self._replicas if key is None else self._replicas.options(session_id=key)
        async with replicas.choose_replica(_reserve=False) as selection:
            return JSONResponse({"replica_id": selection._replica.replica_id.to_full_id_str()})
