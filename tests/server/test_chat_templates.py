"""Chat templates that hang while they are rendered: what that costs the others, and the end of the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fake_server import TEMPLATE, WAIT, FakeServer, make_tokenizer, until

from slipstream.errors import TemplateLimit
from slipstream.load.tokenizer import chat_template
from slipstream.server.service.settings import ServerConfig
from slipstream.server.text.markup.chat_format import ChatFormat
from slipstream.server.text.tools import NO_TOOLS

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HANGS = f"{{% if messages[0].content == 'hang' %}}{LOOPS}{{% endif %}}{TEMPLATE}"
CHAT = "/v1/chat/completions"


def body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than anything here waits."""
    monkeypatch.setattr(chat_template, "SECONDS", 10 * WAIT)


class Hanging:
    """Clients whose chats hang, and a count of those that hang already."""

    def __init__(self, server: FakeServer, count: int) -> None:
        self.server = server
        self.answers: list[httpx.Response] = []
        self.threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _ask(self) -> None:
        with suppress(httpx.TransportError):
            self.answers.append(self.server.post(CHAT, **body("hang")))

    def join(self) -> list[httpx.Response]:
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        return self.answers


@pytest.fixture
def server() -> Iterator[FakeServer]:
    tokenizer = make_tokenizer(HANGS)
    with FakeServer(tokenizer=tokenizer, config=ServerConfig(port=0, drain_seconds=0.5)) as server:
        yield server
    tokenizer.close()


def busy_processes(server: FakeServer) -> int:
    return sum(worker.pid is not None for worker in server.tokenizer._template._workers._workers)


def test_a_chat_that_hangs_is_ended_and_the_next_is_answered(server: FakeServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    for answer in Hanging(server, 3).join():
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "The model's chat template did not finish within 1 seconds."
    monkeypatch.undo()
    assert server.post(CHAT, **body("hi")).status_code == 200


def test_a_chat_over_its_limits_is_not_rendered_again(monkeypatch: Any) -> None:
    """With its system messages joined, as one that was refused is."""
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    tokenizer = make_tokenizer(LOOPS)
    rendered: list[Any] = []
    real = tokenizer.render_chat
    monkeypatch.setattr(tokenizer, "render_chat", lambda *given, **more: rendered.append(given) or real(*given, **more))
    messages = [{"role": role, "content": "x"} for role in ("user", "system")]
    with pytest.raises(TemplateLimit):
        ChatFormat(tokenizer).render(messages, NO_TOOLS, {})
    assert len(rendered) == 1


@pytest.mark.usefixtures("for_ever")
def test_others_are_served_while_chats_hang(server: FakeServer) -> None:
    """More of them than there are processes. Then the server goes, in time, though they hang."""
    hanging = Hanging(server, 5)
    until(lambda: busy_processes(server) == 2)
    assert server.post("/tokenize", prompt="abc").json()["count"] == 3
    assert server.post("/v1/completions", prompt="abc", max_tokens=4).status_code == 200
    assert server.get("/ready").status_code == 200
    server.server.stop()
    server.thread.join(WAIT)
    assert not server.thread.is_alive()
    assert server.server.error is None
    hanging.join()


@pytest.mark.usefixtures("for_ever")
def test_chats_whose_clients_have_left_keep_nobody_from_leaving(server: FakeServer) -> None:
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=body("hang"), timeout=0.5)
    until(lambda: busy_processes(server) == 2)
    server.server.stop()
    server.thread.join(WAIT)
    assert not server.thread.is_alive()
