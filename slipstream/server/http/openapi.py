"""`/openapi.json`: generated from the request models, so the description is what the server checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from slipstream import __version__

PostPath = tuple[str, str, type[BaseModel], str | None]  # path, summary, request model, content type of streams
JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
LIST: dict[str, Any] = {"application/json": {"schema": {"type": "array"}}}
TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
REFUSALS = {
    "400": "The request cannot be served as it is; the message says why",
    "401": "The API key is missing or wrong",
    "403": "The host name is not one of this server's",
    "404": "There is no such model",
    "408": "The body took too long",
    "413": "The body is too large",
    "415": "The content type is not application/json",
    "429": "Too many requests are waiting; see Retry-After",
    "500": "The engine failed",
    "503": "Loading, or shutting down",
}
GET_PATHS = {
    "/v1/models": ("Models served", JSON, ("503",)),
    "/v1/status": ("State, load, speculation and memory", JSON, ()),
    "/metrics": ("Prometheus", TEXT, ()),
    "/health": ("Alive", JSON, ("503",)),
    "/version": ("Version of the server", JSON, ()),
    "/ready": ("Loaded and taking work", JSON, ("503",)),
    "/props": ("Properties of the server (llama.cpp)", JSON, ("503",)),
    "/slots": ("Running and free streams (llama.cpp)", LIST, ("503",)),
    "/lora-adapters": ("None (llama.cpp)", LIST, ()),
    "/api/tags": ("Models served (Ollama)", JSON, ("503",)),
    "/api/ps": ("Models loaded (Ollama)", JSON, ("503",)),
    "/api/version": ("Version of Ollama's API (Ollama)", JSON, ()),
}


def openapi_document(posts: Sequence[PostPath]) -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(request, "validation") for _, _, request, _ in posts], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {path: {"post": _post(summary, request, s)} for path, summary, request, s in posts}
    paths |= {path: {"get": _get(*each)} for path, each in GET_PATHS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _post(summary: str, request: type[BaseModel], stream_type: str | None) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{request.__name__}"}
    content = JSON | ({stream_type: {}} if stream_type else {})
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "OK", "content": content}, **_refusals(REFUSALS)},
    }


def _get(summary: str, content: dict[str, Any], others: tuple[str, ...]) -> dict[str, Any]:
    refused = _refusals({code: REFUSALS[code] for code in ("401", "403", *others)})
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, **refused}}


def _refusals(codes: dict[str, str]) -> dict[str, Any]:
    return {code: {"description": text, "content": JSON} for code, text in codes.items()}
