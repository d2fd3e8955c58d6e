"""Closed by default: addresses, keys, host names, cookies, headers; and nothing of the machine in an error."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator

import httpx
import pytest
from fake_server import FakeServer

from slipstream.errors import ConfigError
from slipstream.server.service.settings import ServerConfig

KEY = "a-secret-key"
PATHS = ["/", "/page/index.html", "/v1/models", "/v1/status", "/metrics", "/openapi.json", "/nowhere"]


@pytest.fixture(scope="module")
def keyed() -> Iterator[FakeServer]:
    with FakeServer(config=ServerConfig(port=0, api_keys=(KEY,), allowed_hosts=("model.example",))) as server:
        yield server


@pytest.fixture
def client(keyed: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=keyed.url, timeout=300) as client:
        yield client


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_keys=(KEY,)).host == host


def test_own_addresses_do_not() -> None:
    assert {ServerConfig(host=host).api_keys for host in ("127.0.0.1", "::1", "localhost")} == {()}


@pytest.mark.parametrize("key", ["", "näh", "a\nb"])
def test_a_key_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServerConfig(api_keys=(key,))


@pytest.mark.parametrize("path", PATHS)
def test_the_key_guards_every_path_but_those_of_probers(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert client.get(path, headers=headers).status_code in (200, 404)
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_metrics_may_be_open() -> None:
    with FakeServer(config=ServerConfig(port=0, api_keys=(KEY,), metrics_without_key=True)) as server:
        assert server.get("/metrics").status_code == 200
        assert {server.get(path).status_code for path in PATHS if path != "/metrics"} == {401}


def test_posts_are_guarded_before_their_body_is_read(client: httpx.Client) -> None:
    for path, shape in (("/v1/chat/completions", "error"), ("/v1/messages", "type")):
        response = client.post(path, content=b"not json")
        assert response.status_code == 401
        assert shape in response.json()


def test_a_page_opened_with_the_key_may_ask_on(client: httpx.Client) -> None:
    assert client.get("/v1/status?key=" + KEY).status_code == 401, "only pages take the key from the address"
    page = client.get("/?key=" + KEY)
    assert page.status_code == 200
    cookie = page.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert KEY not in cookie
    assert client.get("/v1/status").status_code == 200
    assert client.get("/v1/status", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    for site in ("cross-site", "same-site"):
        assert client.get("/v1/status", headers={"sec-fetch-site": site}).status_code == 401
    client.cookies.set("slipstream_key", "0" * 64)
    assert client.get("/").status_code == 401


def test_a_browser_without_the_key_is_asked_for_it(client: httpx.Client) -> None:
    html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    asked = client.get("/", headers=html)
    assert asked.status_code == 401
    assert asked.headers["content-type"] == "text/html; charset=utf-8"
    assert '<form method="post" action="/">' in asked.text
    policy = asked.headers["content-security-policy"]
    style = re.search("<style>(.*)</style>", asked.text, re.DOTALL)
    assert style is not None
    assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() in policy, "the only style it allows"
    assert "default-src 'none'" in policy
    assert "form-action 'self'" in policy
    assert client.get("/", headers={"accept": "*/*"}).json()["error"]["code"] == "invalid_api_key"
    assert client.get("/v1/status", headers=html).json()["error"]["code"] == "invalid_api_key"


def test_the_form_for_the_key(client: httpx.Client) -> None:
    wrong = client.post("/", data={"key": "wrong"})
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
    assert "not a key of this server" in wrong.text
    assert client.post("/", data={"key": "x" * 5000}).status_code == 413
    right = client.post("/", data={"key": KEY})
    assert (right.status_code, right.headers["location"]) == (303, "/")
    assert KEY not in right.headers["set-cookie"]
    assert client.get("/").status_code == 200
    assert client.get("/v1/status").status_code == 200


def test_without_a_key_there_is_no_form(fake: FakeServer) -> None:
    assert httpx.post(fake.url + "/", data={"key": KEY}, timeout=300).status_code == 405


def test_any_of_several_keys() -> None:
    with FakeServer(config=ServerConfig(port=0, api_keys=("one", "two"))) as server:
        codes = [server.get("/v1/models", **{"x-api-key": key}).status_code for key in ("one", "two", "three")]
        assert codes == [200, 200, 401]
        with httpx.Client(base_url=server.url, timeout=300) as client:
            assert client.post("/", data={"key": "two"}).status_code == 303
            assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("10.1.2.3", 200), ("model.example:80", 200),
        ("app.localhost", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("", 403),
    ],
)  # fmt: skip
def test_only_our_own_host_names(client: httpx.Client, host: str, code: int) -> None:
    assert client.get("/health", headers={"host": host}).status_code == code


def test_browsers_get_no_help(fake: FakeServer) -> None:
    page = fake.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    asked = httpx.options(fake.url + "/v1/chat/completions", headers={"origin": "https://evil.example"}, timeout=300)
    assert asked.status_code == 405
    answers = [page, asked, fake.get("/v1/status", origin="https://evil.example")]
    assert not any(name.startswith("access-control") for each in answers for name in each.headers)


@pytest.mark.parametrize("path", ["/page/../settings.py", "/page/%2e%2e/settings.py", "/page//etc/passwd"])
def test_only_the_page_s_own_files(fake: FakeServer, path: str) -> None:
    assert fake.get(path).status_code == 404


BAD = [b"", b"{", b"[]", b"null", b'"x"', b'{"messages": 1}', b"\xff\xfe",
       b'{"messages":[{"role":"user","content":"\\ud800"}]}',
       b'{"prompt":"x","messages":[]}', b"[" * 100_000, b'{"a":' * 5000]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize", "/detokenize", "/v1/responses"])
def test_bad_bodies_are_400_and_leak_nothing(fake: FakeServer, path: str) -> None:
    for body in BAD:
        response = httpx.post(fake.url + path, content=body, headers={"content-type": "application/json"}, timeout=300)
        assert response.status_code == 400, (body[:40], response.text)
        message = response.json()["error"]["message"]
        for leak in ("slipstream/", "site-packages", "0x", "Traceback"):
            assert leak not in message
        assert len(message) < 300


def test_depth_and_size_are_bounded(fake: FakeServer) -> None:
    deep = fake.post("/v1/chat/completions", messages=[], metadata={"a": json.loads("[" * 63 + "]" * 63)})
    assert "nested deeper than 64" in deep.json()["error"]["message"]
    brackets = fake.post("/v1/completions", prompt="[{" * 40 + '\\"[', max_tokens=1)
    assert brackets.status_code == 200, "brackets in a text are no depth"
    large = fake.post("/v1/completions", prompt="x" * (5 << 20))
    assert large.status_code == 413
