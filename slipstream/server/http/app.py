"""The table of paths, and the application around it. What a path does is its endpoint's to know."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from slipstream.server.errors import TYPES, ApiError, in_shape, told
from slipstream.server.http.endpoint import Ask, Generate, Post, check_model
from slipstream.server.http.openapi import describe
from slipstream.server.http.security import Guard
from slipstream.server.http.wire import Receive, Scope, Send
from slipstream.server.protocols.anthropic import Counted
from slipstream.server.protocols.registry import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from slipstream.server.protocols.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    count_tokens,
    detokenize,
    tokenize,
)
from slipstream.server.service.service import Service

PAGE = Path(__file__).parent.parent / "page"


@dataclass(frozen=True, slots=True)
class Posted:
    """A path that takes a body, for the router and for the schema."""

    path: str
    what: str
    endpoint: Post[Any]
    streams: bool = False

    @property
    def request(self) -> type[BaseModel]:
        return self.endpoint.request


def posted(service: Service) -> list[Posted]:
    return [
        Posted("/v1/chat/completions", "Answer a conversation", Generate(service, CHAT), streams=True),
        Posted("/v1/completions", "Continue a text", Generate(service, COMPLETIONS), streams=True),
        Posted("/v1/responses", "Answer, without memory", Generate(service, RESPONSES), streams=True),
        Posted("/v1/messages", "Answer a conversation (Anthropic)", Generate(service, MESSAGES), streams=True),
        Posted("/v1/messages/count_tokens", "Count a prompt's tokens", Ask(service, Counted, count_tokens)),
        Posted("/tokenize", "Text to token ids", Ask(service, TokenizeRequest, tokenize)),
        Posted("/detokenize", "Token ids to text", Ask(service, DetokenizeRequest, detokenize)),
    ]


def document(posts: list[Posted]) -> dict[str, Any]:
    """What /openapi.json says."""
    return describe([(each.path, each.what, each.request, each.streams) for each in posts])


class Counting:
    """Counts responses by path and status. Paths nobody registered share one label."""

    def __init__(self, app: Starlette, service: Service, paths: set[str]) -> None:
        self._app, self._metrics, self._paths = app, service.metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.http.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


def make_app(service: Service, page: Path = PAGE) -> Counting:
    posts = posted(service)
    views = Views(service, page, document(posts))
    routes = [
        *(Route(each.path, endpoint=each.endpoint, methods=["POST"]) for each in posts),
        Route("/v1/models", views.models),
        Route("/v1/models/{model:path}", views.model),
        Route("/v1/status", views.status),
        Route("/metrics", views.metrics),
        Route("/health", views.health),
        Route("/ready", views.ready),
        Route("/openapi.json", views.openapi),
        Route("/", views.index),
        Mount("/page", StaticFiles(directory=page, check_dir=False)),
    ]
    handlers: Any = {ApiError: _tell, HTTPException: _tell_http, Exception: _tell_bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.add_middleware(Guard, config=service.config)
    return Counting(app, service, {route.path for route in routes if isinstance(route, Route)})


class Views:
    """What can be looked at."""

    def __init__(self, service: Service, page: Path, schema: dict[str, Any]) -> None:
        self._service, self._page, self._schema = service, page, schema

    async def index(self, request: Request) -> Response:
        return FileResponse(self._page / "index.html")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._schema)

    async def health(self, request: Request) -> Response:
        """Alive: 200 while the engine is loading, running or draining, 503 once it has failed."""
        failed = self._service.watch.state == "failed"
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def ready(self, request: Request) -> Response:
        state = self._service.watch.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def status(self, request: Request) -> Response:
        return JSONResponse(self._service.watch.report())

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """A list that OpenAI's and Anthropic's clients both read."""
        names = (self._service.loaded().facts.name, *self._service.config.names)
        found = [self._entry(name) for name in dict.fromkeys(names)]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": found, **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        check_model(self._service, name)
        return JSONResponse(self._entry(name))

    def _entry(self, name: str) -> dict[str, Any]:
        created = self._service.created
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": created,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "display_name": name,
            "owned_by": "slipstream",
            "max_model_len": self._service.loaded().engine.info.max_context,
        }


async def _tell(request: Request, error: ApiError) -> Response:
    headers = {key.decode(): value.decode() for key, value in error.headers}
    return JSONResponse(in_shape(error, request.url.path), error.status, headers)


async def _tell_http(request: Request, error: HTTPException) -> Response:
    status = error.status_code if error.status_code in TYPES else 400
    what = {404: "there is nothing at this path", 405: "this path does not take that method"}
    found = JSONResponse(in_shape(ApiError(status, what.get(status, error.detail)), request.url.path), status)
    found.headers.update(error.headers or {})
    return found


async def _tell_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    return JSONResponse(in_shape(told(ApiError(500, "internal error")), request.url.path), 500)
