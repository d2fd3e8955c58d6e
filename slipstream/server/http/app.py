"""The routes and the ASGI application. endpoint.py implements the paths that take a body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from slipstream import __version__
from slipstream.server.errors import TYPES, ApiError, error_body
from slipstream.server.http.access import AccessMiddleware
from slipstream.server.http.endpoint import GenerateEndpoint, JsonEndpoint, PostEndpoint, unknown_model
from slipstream.server.http.openapi import openapi_document
from slipstream.server.http.security import SecurityMiddleware
from slipstream.server.protocols.anthropic.messages import CountTokensRequest
from slipstream.server.protocols.llamacpp.properties import apply_template, lora_adapters, props, slots
from slipstream.server.protocols.not_served import NOT_SERVED
from slipstream.server.protocols.ollama.models import OllamaShowRequest, running, show, tags, version
from slipstream.server.protocols.openai.chat import ChatRequest
from slipstream.server.protocols.registry import (
    CHAT,
    COMPLETIONS,
    LLAMA_COMPLETION,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
)
from slipstream.server.protocols.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    count_tokens,
    detokenize,
    tokenize,
)
from slipstream.server.service.caller import caller
from slipstream.server.service.service import Service

READ = "GET, HEAD"
PAGE = Path(__file__).parent.parent / "page"
REPORTS: dict[str, Callable[[Service], Any]] = {
    "/props": props,
    "/lora-adapters": lora_adapters,
    "/api/tags": tags,
    "/api/ps": running,
    "/api/version": version,
}


class Reports(Protocol):
    """What /metrics and /v1/status say."""

    async def metrics(self, query: Mapping[str, str]) -> bytes: ...
    async def status(self) -> dict[str, Any]: ...


class OwnReports:
    """Of this server alone."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def metrics(self, query: Mapping[str, str]) -> bytes:
        return generate_latest(self._service.metrics.registry)

    async def status(self) -> dict[str, Any]:
        return self._service.monitor.report()


@dataclass(frozen=True, slots=True)
class PostRoute:
    """A path that takes a JSON body: for the router and for the OpenAPI document."""

    path: str
    summary: str
    endpoint: PostEndpoint[Any]

    @property
    def request_model(self) -> type[BaseModel]:
        return self.endpoint.request_model


def post_routes(service: Service) -> list[PostRoute]:
    return [
        PostRoute("/v1/chat/completions", "Answer a conversation", GenerateEndpoint(service, CHAT)),
        PostRoute("/v1/completions", "Continue a text", GenerateEndpoint(service, COMPLETIONS)),
        PostRoute("/v1/responses", "Answer, without memory", GenerateEndpoint(service, RESPONSES)),
        PostRoute("/v1/messages", "Answer a conversation (Anthropic)", GenerateEndpoint(service, MESSAGES)),
        PostRoute(
            "/v1/messages/count_tokens",
            "Count a prompt's tokens",
            JsonEndpoint(service, CountTokensRequest, count_tokens),
        ),
        PostRoute("/tokenize", "Text to token ids", JsonEndpoint(service, TokenizeRequest, tokenize)),
        PostRoute("/detokenize", "Token ids to text", JsonEndpoint(service, DetokenizeRequest, detokenize)),
        PostRoute("/completion", "Continue a text (llama.cpp)", GenerateEndpoint(service, LLAMA_COMPLETION)),
        PostRoute(
            "/apply-template", "Messages to a prompt (llama.cpp)", JsonEndpoint(service, ChatRequest, apply_template)
        ),
        PostRoute("/api/chat", "Answer a conversation (Ollama)", GenerateEndpoint(service, OLLAMA_CHAT)),
        PostRoute("/api/generate", "Answer a prompt (Ollama)", GenerateEndpoint(service, OLLAMA_GENERATE)),
        PostRoute("/api/show", "About the model (Ollama)", JsonEndpoint(service, OllamaShowRequest, show)),
    ]


def document(posts: list[PostRoute]) -> dict[str, Any]:
    """The content of /openapi.json."""
    return openapi_document(
        [(each.path, each.summary, each.request_model, each.endpoint.stream_type) for each in posts]
    )


def make_app(service: Service, page: Path = PAGE, reports: Reports | None = None) -> AccessMiddleware:
    posts = post_routes(service)
    views = Views(service, page, document(posts), reports or OwnReports(service))
    routes = [
        *(Route(each.path, endpoint=each.endpoint, methods=["POST"]) for each in posts),
        Route("/v1/models", views.models),
        Route("/v1/models/{model:path}", views.model),
        Route("/v1/status", views.status),
        Route("/metrics", views.metrics),
        Route("/health", views.health),
        Route("/ready", views.ready),
        Route("/version", views.version),
        Route("/openapi.json", views.openapi),
        Route("/slots", views.slots),
        *(Route(path, views.report(work)) for path, work in REPORTS.items()),
        *(Route(path, _not_served, methods=["GET", "POST", "DELETE"]) for path in NOT_SERVED),
        Route("/", views.index),
        Mount("/page", StaticFiles(directory=page, check_dir=False)),
    ]
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.add_middleware(SecurityMiddleware, config=service.config)
    return AccessMiddleware(app, service.metrics, {route.path for route in routes if isinstance(route, Route)})


class Views:
    """The GET paths."""

    def __init__(self, service: Service, page: Path, schema: dict[str, Any], reports: Reports) -> None:
        self._service, self._page, self._schema, self._reports = service, page, schema, reports

    async def index(self, request: Request) -> Response:
        return FileResponse(self._page / "index.html")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._schema)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def health(self, request: Request) -> Response:
        """Alive: 200 while the engine is loading, running or draining, 503 once it has failed."""
        failed = self._service.monitor.state == "failed"
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def ready(self, request: Request) -> Response:
        state = self._service.monitor.state
        return JSONResponse({"status": state}, 200 if self._service.monitor.takes_work else 503)

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._reports.status())

    async def metrics(self, request: Request) -> Response:
        found = await self._reports.metrics(request.query_params)
        return Response(found, media_type=CONTENT_TYPE_LATEST)

    def report(self, work: Callable[[Service], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def view(request: Request) -> Response:
            return JSONResponse(work(self._service))

        return view

    async def slots(self, request: Request) -> Response:
        found = slots(self._service)
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in found):
            raise ApiError(503, "every stream is busy", code="no_slot", retry_after=1)
        return JSONResponse(found)

    async def models(self, request: Request) -> Response:
        """A list in a shape that OpenAI's and Anthropic's clients both read."""
        names = (self._service.loaded().facts.name, *self._service.config.names)
        found = [self._entry(name) for name in dict.fromkeys(names)]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": found, **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        known = (self._service.loaded().facts.name, *self._service.config.names)
        if name not in known:
            raise unknown_model(name, known)
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
            "max_model_len": self._service.loaded().engine.info.max_model_len,
        }


async def _not_served(request: Request) -> Response:
    raise ApiError(404, NOT_SERVED[request.url.path], code="not_served")


async def _api_error(request: Request, error: ApiError) -> Response:
    caller().error = error.message
    headers = {key.decode(): value.decode() for key, value in error.headers}
    return JSONResponse(error_body(error, request.url.path), error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    status, headers = error.status_code if error.status_code in TYPES else 400, dict(error.headers or {})
    message = "there is nothing at this path" if status == 404 else error.detail
    if status == 405:
        allowed = sorted(headers.get("Allow", READ).split(", "))  # the page's files come without the header
        headers["Allow"] = ", ".join(allowed)
        message = f"this path only takes {' or '.join(allowed)}"
    caller().error = message
    return JSONResponse(error_body(ApiError(status, message), request.url.path), status, headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    caller().error = "internal error"
    return JSONResponse(error_body(ApiError(500, "internal error"), request.url.path), 500)
