"""Around every request: its id, its path's usual spelling, its count in the metrics and its line in the log."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection
from typing import Any

from slipstream.server.errors import ANTHROPIC_PATHS
from slipstream.server.http.logs import log_request
from slipstream.server.http.paths import canonical
from slipstream.server.http.wire import Message, Receive, Scope, Send, header
from slipstream.server.service.caller import Caller, enter
from slipstream.server.service.metrics import Metrics

REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


class AccessMiddleware:
    """``paths``: those with a label of their own in the metrics; all others share one."""

    def __init__(self, app: Any, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, is_complete = time.monotonic(), None, False
        scope["path"] = path = canonical(scope["path"], self._paths)
        caller = Caller(client=_address(scope), request_id=_request_id(scope))
        enter(caller)

        async def observed(message: Message) -> None:
            nonlocal status, is_complete
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.http.labels(path if path in self._paths else "other", str(status)).inc()
                message["headers"] = [*message.get("headers", []), *_id_headers(path, caller.request_id)]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            log_request(_facts(scope, caller, status, time.monotonic() - began) | {"complete": is_complete})


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def _request_id(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    return given if given is not None and REQUEST_ID.fullmatch(given) else new_request_id()


def _id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    found = [(b"x-request-id", request_id.encode())]
    return [*found, (b"request-id", request_id.encode())] if path.startswith(ANTHROPIC_PATHS) else found


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope["client"] else ""


def _facts(scope: Scope, caller: Caller, status: int | None, seconds: float) -> dict[str, Any]:
    facts = {
        "client": _address(scope),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(seconds * 1e3),
        "request_id": caller.request_id,
    }
    if caller.client != facts["client"]:
        facts["key"] = caller.client
    if caller.num_prompt is not None and caller.num_output is not None:
        facts |= {"prompt_tokens": caller.num_prompt, "output_tokens": caller.num_output}
    return facts | {"error": caller.error} if caller.error else facts
