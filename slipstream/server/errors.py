"""Errors as clients receive them, in the shape of their protocol.

A message says what to change, and never contains a path, an address or a traceback of this machine.
"""

from __future__ import annotations

from typing import Any

from slipstream.errors import (
    ConfigError,
    EngineDead,
    GrammarError,
    GrammarsUnavailable,
    PromptTooLong,
    RequestError,
    SlipstreamError,
    TemplatesUnavailable,
    printable,
)

# status -> the error's type in OpenAI's and in Anthropic's protocol
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}
ANTHROPIC_PATHS = "/v1/messages"


class ApiError(SlipstreamError):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        assert status in TYPES
        self.status = status
        self.message = printable(message, keep="\n\t")  # it may quote a model file, and clients print it
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.close = close  # the connection cannot be used for another request

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [] if self.retry_after is None else [(b"retry-after", str(self.retry_after).encode())]
        return [*headers, (b"connection", b"close")] if self.close else headers


class ClientDisconnected(SlipstreamError):
    """The client has disconnected: no response is sent."""


def to_api_error(error: SlipstreamError) -> ApiError:
    """Translates an error of the engine or the grammar room."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), param="messages", code="context_length_exceeded")
        case GrammarError():
            where = str(error).partition(":")[0]
            return ApiError(400, str(error), param=None if " " in where else where, code="invalid_grammar")
        case GrammarsUnavailable():
            return ApiError(500, f"no grammar can be used now: {error}", code="grammars_unavailable")
        case TemplatesUnavailable():
            return ApiError(500, f"no chat can be answered now: {error}", code="templates_unavailable")
        case RequestError() | ConfigError():
            return ApiError(400, str(error))
        case EngineDead():
            return engine_failed()
    return ApiError(500, "internal error")


def engine_failed() -> ApiError:
    return ApiError(500, "the engine failed and the server is going down", code="engine_failed")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    shape = next((shape for start, shape in SHAPES.items() if path.startswith(start)), openai_error)
    return shape(error)


def openai_error(error: ApiError) -> dict[str, Any]:
    kind = TYPES[error.status][0]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": TYPES[error.status][1], "message": _with_place(error)}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": _with_place(error)}


def _with_place(error: ApiError) -> str:
    """For shapes that have no field for it: the message names the parameter."""
    return f"{error.param}: {error.message}" if error.param and error.param not in error.message else error.message


SHAPES = {ANTHROPIC_PATHS: anthropic_error, "/api/": ollama_error}  # by the start of the path; others are OpenAI's
