"""Request ids, the access log and the spellings of paths."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from fake_server import FakeServer, until
from test_behaviour_under_load import CHAT, HELLO, LONG
from test_engine import GatedRunner

import slipstream
from slipstream.errors import ConfigError
from slipstream.server.http.logs import JsonFormatter, Seldom, log_request, printable
from slipstream.server.http.paths import canonical
from slipstream.server.service.settings import ServerConfig

FACTS: dict[str, Any] = {
    "client": "c", "method": "GET", "path": "/x", "status": 200, "complete": True, "ms": 1, "request_id": "r"
}  # fmt: skip


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "slipstream.access")
    return caplog


def line_of(log: pytest.LogCaptureFixture, request_id: str) -> logging.LogRecord:
    """The client may have its answer before the line is written."""

    def found() -> list[logging.LogRecord]:
        return [record for record in list(log.records) if getattr(record, "facts", FACTS)["request_id"] == request_id]

    until(lambda: bool(found()))
    [record] = found()
    return record


# ---- request ids ----


@pytest.mark.parametrize("path", ["/health", "/nowhere", CHAT, "/v1/messages", "/"])
def test_every_response_has_an_id(fake: FakeServer, path: str) -> None:
    """Errors, too: most of these are no POST paths."""
    made = [fake.get(path).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert fake.get(path, **{"x-request-id": "my id-1"}).headers["x-request-id"] == "my id-1"
    for bad in ("x" * 129, "caf\u00e9"):
        answer = httpx.get(fake.url + path, headers={"x-request-id": bad.encode("latin-1")}, timeout=300)
        assert answer.headers["x-request-id"].startswith("req_")


def test_streams_and_refusals_have_it_too(fake: FakeServer) -> None:
    headers = {"x-request-id": "mine"}
    for body in (LONG, {"messages": 1}):
        answer = httpx.post(fake.url + CHAT, json=body, headers=headers, timeout=300)
        assert answer.headers["x-request-id"] == "mine"
    anthropic = httpx.post(fake.url + "/v1/messages", json={}, headers=headers, timeout=300)
    assert anthropic.headers["request-id"] == "mine", "the name that Anthropic's client reads"


# ---- the log ----


def test_a_line_a_request(fake: FakeServer, log: pytest.LogCaptureFixture) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "seed": 5}
    for stream in (True, False):
        answer = httpx.post(
            fake.url + CHAT, json=body | {"stream": stream}, headers={"x-request-id": f"{stream}"}, timeout=300
        )
        assert answer.status_code == 200
        record = line_of(log, f"{stream}")
        assert record.levelno == logging.INFO
        assert f"127.0.0.1 POST {CHAT} 200 in" in record.getMessage()
        assert "8 + 3 tokens" in record.getMessage()
        assert "hello" not in record.getMessage()


def test_a_refusal_says_why(fake: FakeServer, log: pytest.LogCaptureFixture) -> None:
    fake.get("/nowhere", **{"x-request-id": "404"})
    httpx.post(fake.url + CHAT, json={"messages": 1}, headers={"x-request-id": "400"}, timeout=300)
    for code, why in (("404", "nothing at this path"), ("400", "messages")):
        record = line_of(log, code)
        assert record.levelno == logging.WARNING
        assert why in record.getMessage()


def test_who_left_is_noted(log: pytest.LogCaptureFixture) -> None:
    with FakeServer(GatedRunner(), ServerConfig(port=0, keep_alive_seconds=0.05)) as server:
        server.runner.fuel.put(1)
        headers = {"x-request-id": "left"}
        with httpx.stream("POST", server.url + CHAT, json=LONG, headers=headers, timeout=300) as answer:
            assert answer.status_code == 200
        assert "200, client left, in" in line_of(log, "left").getMessage()


def test_polling_is_quiet(fake: FakeServer, log: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/status"):
        fake.get(path, **{"x-request-id": path})
        assert line_of(log, path).levelno == logging.DEBUG


def test_a_clients_text_stays_on_its_line(log: pytest.LogCaptureFixture) -> None:
    log_request(FACTS | {"path": "/a\n2026 INFO \x1b[31m" + "x" * 5000, "status": 404, "error": "no 100%s\r\n"})
    [record] = log.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 1000
    assert printable("a\u2028b") == "a\\u2028b"


def test_json_lines(log: pytest.LogCaptureFixture) -> None:
    log_request(FACTS | {"status": 400, "error": "bad"})
    log_request(FACTS | {"status": None, "complete": False})
    first, second = (json.loads(JsonFormatter().format(record)) for record in log.records)
    assert (first["level"], first["status"], first["error"], first["request_id"]) == ("warning", 400, "bad", "r")
    assert "client left" in second["message"]


def test_warnings_about_connections_are_seldom(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("slipstream.test"), seconds=1e9)
    for _ in range(3):
        seldom.warn("noise")
    seldom._last = -2e9
    seldom.warn("noise")
    assert [record.getMessage() for record in caplog.records] == ["noise", "noise (2 more like this)"]


@pytest.mark.parametrize("wrong", [{"log_level": "loud"}, {"log_format": "xml"}])
def test_unknown_log_settings(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        ServerConfig(**wrong)  # type: ignore[arg-type]


# ---- paths ----


@pytest.mark.parametrize(("path", "meant"), [
    ("/chat/completions", CHAT), (CHAT + "/", CHAT), ("/v1/v1/chat/completions", CHAT), ("//v1/chat/completions", CHAT),
    ("/v1/v1/v1/models", "/v1/models"), ("/models/a/b", "/v1/models/a/b"), ("/v1/tokenize", "/tokenize"),
    ("/v1/health", "/health"), ("/", "/"), ("/v1", "/v1"), ("/nowhere/", "/nowhere"), ("/v1x/models", "/v1x/models"),
])  # fmt: skip
def test_spellings(path: str, meant: str) -> None:
    assert canonical(path, {CHAT, "/v1/models", "/tokenize", "/health", "/"}) == meant


@pytest.mark.parametrize("path", ["/completions", "/v1/completions/", "/v1/v1/completions", "//v1/completions"])
def test_a_base_url_with_too_much_or_too_little(fake: FakeServer, path: str) -> None:
    before = counted(fake, "/v1/completions")
    assert fake.post(path, prompt="a", max_tokens=1).status_code == 200
    assert counted(fake, "/v1/completions") == before + 1, "counted under the usual spelling"


def counted(fake: FakeServer, path: str) -> float:
    wanted = f'slipstream_http_requests_total{{path="{path}",status="200"}}'
    found = [line for line in fake.get("/metrics").text.splitlines() if line.startswith(wanted)]
    return float(found[0].split()[-1]) if found else 0.0


def test_errors_keep_the_shape_of_their_protocol(fake: FakeServer) -> None:
    assert fake.post("/messages", messages=1).json()["type"] == "error"


def test_version_and_head(fake: FakeServer) -> None:
    assert fake.get("/version").json() == {"version": slipstream.__version__}
    for path in ("/", "/health", "/ready", "/v1/models", "/metrics", "/version", "/v1/status"):
        answer = httpx.head(fake.url + path, timeout=300)
        assert (answer.status_code, answer.content) == (200, b"")
