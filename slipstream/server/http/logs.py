"""The log: one line a request, as text or as JSON, on standard error. Never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

ACCESS = logging.getLogger("slipstream.access")
# Polled by the page and by monitors: a line each at level debug.
QUIET_PATHS = ("/health", "/ready", "/metrics", "/v1/status")
MAX_SHOWN = 300  # characters of a client's text


def set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("slipstream").setLevel(level.upper())
    # Its warnings are about single connections: whoever can connect could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One object a line; a request's line has its facts as fields."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def log_request(facts: dict[str, Any]) -> None:
    """A refusal or failure is a warning that says why.

    ``facts``: client, method, path, status (None: there was no response), complete (False: the client left), ms,
    request_id; where they are known, error and tokens.
    """
    status, error = facts["status"], facts.get("error", "")
    level = logging.WARNING if error or (status or 0) >= 400 else logging.INFO
    quiet = facts["path"].startswith("/page/") or facts["path"] in QUIET_PATHS
    if quiet and status in (200, 304, 503):
        level = logging.DEBUG
    if ACCESS.isEnabledFor(level):
        facts = {name: printable(value) if isinstance(value, str) else value for name, value in facts.items()}
        ACCESS.log(level, _line(facts), extra={"facts": facts})


def _line(facts: dict[str, Any]) -> str:
    status = str(facts["status"] or "no response") + ("" if facts["complete"] else ", client left,")
    tokens = f", {facts['prompt_tokens']} + {facts['output_tokens']} tokens" if "output_tokens" in facts else ""
    why = f": {facts['error']}" if facts.get("error") else ""
    head = f"{facts['client']} {facts['method']} {facts['path']} {status} in {facts['ms']} ms"
    return f"{head}{tokens}{why} [{facts['request_id']}]"


def printable(text: str) -> str:
    """On one line, without control characters, cut where it is long."""
    text = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class Seldom:
    """At most one warning in ``seconds``; the next one tells how many were left out."""

    def __init__(self, logger: logging.Logger, seconds: float = 60.0) -> None:
        self._logger, self._seconds = logger, seconds
        self._last = -seconds
        self._num_left_out = 0

    def warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < self._seconds:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more like this)" if self._num_left_out else ""
        self._last, self._num_left_out = now, 0
        self._logger.warning("%s%s", text, more)
