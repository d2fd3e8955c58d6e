"""Pages of other origins: what they may send and read, and the content types that browsers send without asking."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_server import FakeServer
from test_behaviour_under_load import CHAT, HELLO, LONG

from slipstream.errors import ConfigError
from slipstream.server.service.settings import ServerConfig

OURS, EVIL = "https://app.example", "https://evil.example"
BODY = b'{"prompt": "a", "max_tokens": 1}'
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def open_() -> Iterator[FakeServer]:
    config = ServerConfig(port=0, api_keys=("k",), cors_origins=(OURS,))
    with FakeServer(config=config) as server:
        yield server


def preflight(server: FakeServer, origin: str) -> httpx.Response:
    return httpx.options(server.url + CHAT, headers={"origin": origin, **PREFLIGHT}, timeout=300)


def test_a_preflight_of_an_allowed_origin_needs_no_key(open_: FakeServer) -> None:
    asked = preflight(open_, OURS)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == OURS
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in asked.headers


@pytest.mark.parametrize("stream", [True, False])
def test_its_answers_may_be_read(open_: FakeServer, stream: bool) -> None:
    headers = {"origin": OURS, "x-api-key": "k"}
    answer = httpx.post(open_.url + CHAT, json=LONG | {"stream": stream}, headers=headers, timeout=300)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == OURS
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = httpx.post(open_.url + CHAT, json=LONG, headers={"origin": OURS}, timeout=300)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, OURS)


def test_other_origins_stay_outside(open_: FakeServer) -> None:
    asked = preflight(open_, EVIL)
    assert asked.status_code == 401
    answer = open_.get("/v1/models", origin=EVIL, **{"x-api-key": "k"})
    assert not any(name.startswith("access-control") for each in (asked, answer) for name in each.headers)
    assert answer.headers["vary"] == "origin"


def test_all_origins() -> None:
    with FakeServer(config=ServerConfig(port=0, cors_origins=("*",))) as server:
        assert preflight(server, EVIL).headers["access-control-allow-origin"] == "*"
        answer = httpx.post(server.url + CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"origin": EVIL})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/page", ""])
def test_origins_are_written_as_browsers_send_them(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin"):
        ServerConfig(cors_origins=(origin,))


# ---- content types ----


def post(server: FakeServer, kind: str | None, **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()} | (
        {} if kind is None else {"content-type": kind}
    )
    return httpx.post(server.url + "/v1/completions", content=BODY, headers=given, timeout=300).status_code


SIMPLE = [None, "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"]


@pytest.mark.parametrize("kind", SIMPLE)
def test_clients_that_are_no_browsers_need_no_content_type(fake: FakeServer, kind: str | None) -> None:
    own = fake.url.replace("127.0.0.1", "localhost")
    assert post(fake, kind) == 200
    assert post(fake, kind, sec_fetch_site="none") == 200
    assert post(fake, kind, host=own.removeprefix("http://"), origin=own, sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("headers", [
    {"origin": EVIL}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"}, {"origin": EVIL, "sec_fetch_site": "same-origin"},
])  # fmt: skip
def test_pages_of_other_origins_do(fake: FakeServer, kind: str | None, headers: dict[str, str]) -> None:
    """A browser sends these types without a preflight."""
    assert post(fake, kind, **headers) == 415


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/xml", "application/octet-stream"])
def test_other_content_types(fake: FakeServer, kind: str) -> None:
    assert post(fake, kind) == 415


def test_an_allowed_origin_may_leave_it_out(open_: FakeServer) -> None:
    assert post(open_, "text/plain", origin=OURS, sec_fetch_site="cross-site", x_api_key="k") == 200
    assert post(open_, "text/plain", origin=EVIL, sec_fetch_site="cross-site", x_api_key="k") == 415
