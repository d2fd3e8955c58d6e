"""Access checks: host name and API key; and the security headers of every response. Other origins: cors.py."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from slipstream.server.errors import ApiError, ClientDisconnected
from slipstream.server.http.cors import cors_headers, preflight_headers
from slipstream.server.http.key_form import FORM_HEADERS, is_form, key_form, read_key, wants_form
from slipstream.server.http.wire import (
    Headers,
    Receive,
    Scope,
    Send,
    header,
    send_bytes,
    send_empty,
    send_error,
)
from slipstream.server.service.caller import caller
from slipstream.server.service.settings import ServerConfig

COOKIE = "slipstream_key"
OPEN_PATHS = ("/health", "/ready")  # a prober or a load balancer has no key; they say one word
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
        self._keys = [key.encode() for key in config.api_keys]
        self._open_paths = {*OPEN_PATHS, *(["/metrics"] if config.metrics_without_key else [])}
        self._origins = tuple(origin.lower() for origin in config.cors_origins)
        own = {"localhost", socket.gethostname().lower(), config.host.lower()}
        self._hosts = own | {name.lower() for name in config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [*HEADERS, *cors_headers(scope, self._origins)]
        page_headers = PAGE_HEADERS if is_page(scope) else []
        try:
            self._check_host(scope)
            if (preflight := preflight_headers(scope, self._origins)) is not None:
                await send_empty(_with(send, headers), 204, preflight)
            elif self._keys and is_form(scope):
                await self._sign_in(scope, receive, _with(send, headers))
            else:
                more = self._check_key(scope)
                await self._app(scope, receive, _with(send, [*headers, *page_headers, *more]))
        except ClientDisconnected:
            return
        except ApiError as error:
            if error.status == 401 and wants_form(scope):
                await _send_form(_with(send, headers), error, was_wrong=_query_key(scope) is not None)
            else:
                await send_error(scope, _with(send, [*headers, *page_headers]), error)

    def _check_host(self, scope: Scope) -> None:
        """The Host must be an allowed name or an IP address. Protects from DNS rebinding."""
        given = [value.decode("latin-1").lower() for key, value in scope["headers"] if key == b"host"]
        if len(given) > 1:
            raise ApiError(400, "the request names more than one host", close=True)
        host = given[0] if given else ""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name not in self._hosts and not name.endswith(".localhost") and not _is_address(name):
            raise ApiError(403, "this server does not answer to that host name: see --allowed-host", close=True)

    def _check_key(self, scope: Scope) -> Headers:
        """Checks the API key. Headers to add: a page opened with the key gets a cookie for its later requests."""
        if not self._keys or scope["path"] in self._open_paths:
            return []
        key = self._key_of(_sent_keys(scope))
        if key is None:
            key = self._key_of_cookie(scope)
        cookie: Headers = []
        if key is None and is_page(scope):
            key = self._key_of([_query_key(scope)])
            cookie = [] if key is None else [_cookie_header(key)]
        if key is None:
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; "
                "open the page as /?key=KEY",
                code="invalid_api_key",
                close=True,
            )
        caller().key = hashlib.sha256(key).hexdigest()
        if len(self._keys) > 1:
            caller().client = f"key {self._keys.index(key) + 1}"
        return cookie

    async def _sign_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The form for the key was sent: a cookie, and on to the page; or the form again."""
        key = self._key_of([await read_key(scope, receive)])
        if key is None:
            await _send_form(send, ApiError(401, "the API key of the form is wrong", close=True), was_wrong=True)
        else:
            await send_empty(send, 303, [(b"location", b"/"), _cookie_header(key)])

    def _key_of(self, given: Iterable[str | None]) -> bytes | None:
        """The key that was sent, if it is one of ours. Takes as long for a wrong one as for a right one."""
        sent = [each.encode("utf-8", "replace") for each in given if each is not None]
        found = [key for key in self._keys for each in sent if hmac.compare_digest(each, key)]
        return found[0] if found else None

    def _key_of_cookie(self, scope: Scope) -> bytes | None:
        """The cookie is valid for requests of the same origin only."""
        if header(scope, b"sec-fetch-site") not in (None, "same-origin", "none"):
            return None
        sent = _cookie(scope).encode("utf-8", "replace")
        found = [key for key in self._keys if hmac.compare_digest(sent, _token(key).encode())]
        return found[0] if found else None


def _token(key: bytes) -> str:
    """The cookie's value: derived from the key, since browsers send cookies to every port of a host."""
    return hmac.new(key, b"slipstream page", hashlib.sha256).hexdigest()


def _cookie_header(key: bytes) -> tuple[bytes, bytes]:
    return (b"set-cookie", f"{COOKIE}={_token(key)}; HttpOnly; SameSite=Strict; Path=/".encode())


async def _send_form(send: Send, error: ApiError, was_wrong: bool) -> None:
    caller().error = error.message
    headers = [*FORM_HEADERS, *error.headers]
    await send_bytes(send, key_form(was_wrong), b"text/html; charset=utf-8", error.status, headers)


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
