"""`slipstream serve owner/repository:TYPE`, from the download to a chat, and once more without the hub."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny_gguf
from fake_hub import NO_HUB, FakeHub, environment, fake_hub
from real_server import WAIT, RealServer
from tiny_gguf import Options

REPOSITORY = "some-org/Tiny-GGUF"
NAME = f"{REPOSITORY}:Q4_K"
FILES = [f"Q4_K/Tiny-Q4_K-0000{i}-of-00002.gguf" for i in (1, 2)]
HEAD = "mtp-Tiny-Q8_0.gguf"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A model in two parts, its head, and another model."""
    folder = tmp_path / "hub" / REPOSITORY
    (folder / "Q4_K").mkdir(parents=True)
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    written = Options(lambda name: "Q4_K", head=False, parts=2, metadata=(("tokenizer.chat_template", TEMPLATE),))
    tiny_gguf.write(model, folder / "Q4_K" / "Tiny-Q4_K.gguf", written)
    tiny_gguf.write(model, folder / HEAD, Options(lambda name: "Q8_0", trunk=False))
    (folder / "Tiny-BF16.gguf").write_bytes(b"never asked for")
    with fake_hub(tmp_path / "hub") as hub:
        yield hub


def wait_until_asked(hub: FakeHub) -> None:
    until = time.monotonic() + WAIT
    while not hub.sent and time.monotonic() < until:
        time.sleep(0.02)
    assert hub.sent


def lines(server: RealServer, start: str) -> list[str]:
    return [line for line in server.output if line.startswith(start)]


def asked(server: RealServer) -> str:
    """What a chat answers; also looks at the names that the server shows."""
    answer = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    ).json()
    assert answer["model"] == NAME
    assert answer["usage"]["completion_tokens"] == 8
    assert [each["id"] for each in httpx.get(f"{server.url}/v1/models", timeout=WAIT).json()["data"]] == [NAME]
    assert server.status()["model"]["id"] == NAME
    assert server.status()["model"]["format"] == "GGUF, Q4_K"
    assert server.status()["speculation"]["available"]
    assert httpx.get(server.url, timeout=WAIT, follow_redirects=True).status_code == 200
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_from_the_download_to_a_chat_and_again_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    known = environment(hub, tmp_path / "cache")
    small = ("--max-streams", "2", "--kv-memory", "1M")
    hub.open.clear()
    with RealServer(NAME, *small, env=known, loaded=False) as server:
        wait_until_asked(hub)
        assert httpx.get(f"{server.url}/ready", timeout=WAIT).status_code == 503
        assert server.status()["state"] == "loading"
        hub.open.set()
        server.wait_until_loaded()
        first = asked(server)
        assert server.output[0].endswith(f", loading {NAME}")
        assert lines(server, f"fetching {REPOSITORY}: ")
        assert len(lines(server, f"fetched {REPOSITORY}: ")) == 2, "the model and its head"
        assert lines(server, "loading: ")
        assert lines(server, "model ") == [f"model   {NAME} (qwen3_5; GGUF, Q4_K), its MTP head in {HEAD}"]
    assert sorted(hub.sent) == [*FILES, HEAD]
    hub.sent.clear()
    with RealServer(NAME, *small, env=known | NO_HUB) as server:
        assert asked(server) == first
        assert not lines(server, "fetch")
    assert not hub.sent
