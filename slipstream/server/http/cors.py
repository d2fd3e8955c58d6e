"""Pages of other origins: what a browser lets them send and read. Off unless origins are allowed by name, or all.

Browsers send a JSON body across origins only after a preflight. Other content types, and a body without one, come
without asking: they are taken only from clients that are no pages of other origins.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.errors import ApiError
from slipstream.server.http.wire import Headers, Scope, header

# What a browser sends without a preflight, besides forms with files. curl -d sends the first.
SIMPLE_TYPES = ("application/x-www-form-urlencoded", "text/plain", "")
PREFLIGHT_SECONDS = 600


def check_content_type(scope: Scope, allowed: Sequence[str]) -> None:
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and (kind not in SIMPLE_TYPES or is_foreign(scope, allowed)):
        raise ApiError(415, "the content type must be application/json", close=True)


def is_foreign(scope: Scope, allowed: Sequence[str]) -> bool:
    """Whether a browser sent it for a page of another origin that is not allowed."""
    origin = header(scope, b"origin")
    if origin is not None and _is_allowed(origin, allowed):
        return False
    if origin is not None and origin.partition("://")[2].lower() != (header(scope, b"host") or "").lower():
        return True
    return header(scope, b"sec-fetch-site") not in (None, "same-origin", "none")


def cors_headers(scope: Scope, allowed: Sequence[str]) -> Headers:
    """Of a response to a page of another origin, if that is allowed."""
    if not allowed:
        return []
    origin = header(scope, b"origin")
    if origin is None or not _is_allowed(origin, allowed):
        return [(b"vary", b"origin")]
    return [
        (b"access-control-allow-origin", b"*" if "*" in allowed else origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
        (b"vary", b"origin"),
    ]


def preflight_headers(scope: Scope, allowed: Sequence[str]) -> Headers | None:
    """The answer to a browser's question whether it may send a request, or None if this is no such question."""
    origin, method = header(scope, b"origin"), header(scope, b"access-control-request-method")
    if scope["method"] != "OPTIONS" or method is None or origin is None or not _is_allowed(origin, allowed):
        return None
    wanted = header(scope, b"access-control-request-headers") or ""
    private = header(scope, b"access-control-request-private-network") == "true"
    return [
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-allow-headers", wanted.encode("latin-1")),
        (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
        *([(b"access-control-allow-private-network", b"true")] if private else []),
    ]


def _is_allowed(origin: str, allowed: Sequence[str]) -> bool:
    return "*" in allowed or origin.lower() in allowed
