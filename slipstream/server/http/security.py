"""Access checks: host name and API key; and the security headers of every response.

CORS stays off: no header ever allows another origin. Bodies must be JSON (wire.py), which browsers send across origins
only after a preflight.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from slipstream.server.errors import ApiError
from slipstream.server.http.wire import Receive, Scope, Send, header, send_error
from slipstream.server.service.settings import ServerConfig

COOKIE = "slipstream_key"
OPEN_PATHS = ("/health",)
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
PAGE_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-cache"),
]


class SecurityMiddleware:
    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._app = app
        self._key = None if config.api_key is None else config.api_key.encode()
        own = {"localhost", socket.gethostname().lower(), config.host.lower()}
        self._hosts = own | {name.lower() for name in config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        more = list(HEADERS) + (PAGE_HEADERS if is_page(scope) else [])
        try:
            self._check_host(scope)
            more += self._check_key(scope)
        except ApiError as error:
            await send_error(scope, _with(send, more), error)
            return
        await self._app(scope, receive, _with(send, more))

    def _check_host(self, scope: Scope) -> None:
        """The Host must be an allowed name or an IP address. Protects from DNS rebinding."""
        given = (header(scope, b"host") or "").lower()
        name = given.rpartition(":")[0] if given.rpartition(":")[2].isdigit() else given
        if name not in self._hosts and not name.endswith(".localhost") and not _is_address(name):
            raise ApiError(403, "this server does not answer to that host name: see --allowed-host", close=True)

    def _check_key(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Checks the API key. Headers to add: a page opened with the key gets a cookie for its later requests."""
        if self._key is None or scope["path"] in OPEN_PATHS:
            return []
        if any(map(self._is_key, _sent_keys(scope))) or self._has_cookie(scope):
            return []
        if is_page(scope) and self._is_key(_query_key(scope)):
            cookie = f"{COOKIE}={self._token(self._key)}; HttpOnly; SameSite=Strict; Path=/"
            return [(b"set-cookie", cookie.encode())]
        raise ApiError(
            401,
            "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; "
            "open the page as /?key=KEY",
            code="invalid_api_key",
            close=True,
        )

    def _is_key(self, given: str | None) -> bool:
        assert self._key is not None
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self._key)

    def _has_cookie(self, scope: Scope) -> bool:
        """The cookie is valid for requests of the same origin only."""
        if header(scope, b"sec-fetch-site") not in (None, "same-origin", "none"):
            return False
        assert self._key is not None
        return hmac.compare_digest(_cookie(scope).encode("utf-8", "replace"), self._token(self._key).encode())

    @staticmethod
    def _token(key: bytes) -> str:
        """The cookie's value: derived from the key, since browsers send cookies to every port of a host."""
        return hmac.new(key, b"slipstream page", hashlib.sha256).hexdigest()


def is_page(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and (scope["path"] == "/" or scope["path"].startswith("/page/"))


def _sent_keys(scope: Scope) -> list[str | None]:
    scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
    return [token.strip() if scheme.lower() == "bearer" else None, header(scope, b"x-api-key")]


def _query_key(scope: Scope) -> str | None:
    return next(iter(parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16).get("key", [])), None)


def _cookie(scope: Scope) -> str:
    try:
        found = SimpleCookie(header(scope, b"cookie") or "").get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _with(send: Send, more: list[tuple[bytes, bytes]]) -> Send:
    async def add(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *more]
        await send(message)

    return add
