"""The routes and the ASGI application. endpoint.py implements the paths that take a body."""

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

from slipstream.server.errors import TYPES, ApiError, error_body
from slipstream.server.http.endpoint import GenerateEndpoint, JsonEndpoint, PostEndpoint, check_model
from slipstream.server.http.openapi import openapi_document
from slipstream.server.http.security import SecurityMiddleware
from slipstream.server.http.wire import Receive, Scope, Send
from slipstream.server.protocols.anthropic import CountTokensRequest
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
class PostRoute:
    """A path that takes a JSON body: for the router and for the OpenAPI document."""

    path: str
    summary: str
    endpoint: PostEndpoint[Any]
    streams: bool = False

    @property
    def request_model(self) -> type[BaseModel]:
        return self.endpoint.request_model


def post_routes(service: Service) -> list[PostRoute]:
    return [
        PostRoute("/v1/chat/completions", "Answer a conversation", GenerateEndpoint(service, CHAT), streams=True),
        PostRoute("/v1/completions", "Continue a text", GenerateEndpoint(service, COMPLETIONS), streams=True),
        PostRoute("/v1/responses", "Answer, without memory", GenerateEndpoint(service, RESPONSES), streams=True),
        PostRoute(
            "/v1/messages", "Answer a conversation (Anthropic)", GenerateEndpoint(service, MESSAGES), streams=True
        ),
        PostRoute(
            "/v1/messages/count_tokens",
            "Count a prompt's tokens",
            JsonEndpoint(service, CountTokensRequest, count_tokens),
        ),
        PostRoute("/tokenize", "Text to token ids", JsonEndpoint(service, TokenizeRequest, tokenize)),
        PostRoute("/detokenize", "Token ids to text", JsonEndpoint(service, DetokenizeRequest, detokenize)),
    ]


def document(posts: list[PostRoute]) -> dict[str, Any]:
    """The content of /openapi.json."""
    return openapi_document([(each.path, each.summary, each.request_model, each.streams) for each in posts])


class CountingMiddleware:
    """Counts responses by path and status. Unknown paths share one label."""

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


def make_app(service: Service, page: Path = PAGE) -> CountingMiddleware:
    posts = post_routes(service)
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
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.add_middleware(SecurityMiddleware, config=service.config)
    return CountingMiddleware(app, service, {route.path for route in routes if isinstance(route, Route)})


class Views:
    """The GET paths."""

    def __init__(self, service: Service, page: Path, schema: dict[str, Any]) -> None:
        self._service, self._page, self._schema = service, page, schema

    async def index(self, request: Request) -> Response:
        return FileResponse(self._page / "index.html")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._schema)

    async def health(self, request: Request) -> Response:
        """Alive: 200 while the engine is loading, running or draining, 503 once it has failed."""
        failed = self._service.monitor.state == "failed"
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def ready(self, request: Request) -> Response:
        state = self._service.monitor.state
        return JSONResponse({"status": state}, 200 if self._service.monitor.takes_work else 503)

    async def status(self, request: Request) -> Response:
        return JSONResponse(self._service.monitor.report())

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """A list in a shape that OpenAI's and Anthropic's clients both read."""
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


async def _api_error(request: Request, error: ApiError) -> Response:
    headers = {key.decode(): value.decode() for key, value in error.headers}
    return JSONResponse(error_body(error, request.url.path), error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    status = error.status_code if error.status_code in TYPES else 400
    messages = {404: "there is nothing at this path", 405: "this path does not take that method"}
    found = JSONResponse(error_body(ApiError(status, messages.get(status, error.detail)), request.url.path), status)
    found.headers.update(error.headers or {})
    return found


async def _internal_error(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    return JSONResponse(error_body(ApiError(500, "internal error"), request.url.path), 500)
