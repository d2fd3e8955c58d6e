"""The server as it is, on a real socket, in a thread, on the fake runner and a tokenizer of 97 characters."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import httpx
import tokenizers
from fakes import FakeRunner, continuation, make_info
from test_engine import GatedRunner

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner
from slipstream.engine.engine import Engine
from slipstream.load import Tokenizer
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.sampling import NEUTRAL, SamplingDefaults
from slipstream.server.http.lifecycle import Server
from slipstream.server.service.model_holder import LoadedModel
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import ModelFacts

WAIT = 300.0
END = 96
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
ENGINE = EngineConfig(max_streams=4, max_step_tokens=32, min_chunk=4, draft=2, block_size=4)
FACTS = ModelFacts(
    "fake",
    "hash",
    "none",
    "fake",
    weight_bytes=1,
    kv_token_bytes=8,
    state_bytes=0,
    kv_dtype="int16",
    state_dtype="int8",
)
LINES = "\n" + "".join(map(chr, range(32, 127)))  # the characters of the vocabulary, by id


MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def make_tokenizer(template: str = TEMPLATE, markers: Sequence[str] = (), special: Sequence[str] = ()) -> Tokenizer:
    """``markers`` and ``special``: tokens of their own, after the end token."""
    shown = LINES.replace("\n", "\u010a").replace(" ", "\u0120")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(shown)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(list(markers))
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, "byte_level", ChatTemplate({"default": template}, {}), eos_token_ids=(END,))


TOKENIZER = make_tokenizer()


def said(prompt: str, seed: int, count: int) -> str:
    """What the fake model answers to a text."""
    tokens = continuation(TOKENIZER.encode(prompt), seed, 97, count, (END,))
    return TOKENIZER.decode(tokens)


def asked(text: str) -> str:
    """A user's message as the template writes it."""
    return f"u:{text}\n"


class FakeServer:
    engine_type: type[Engine] = Engine

    def __init__(
        self,
        runner: Runner | None = None,
        config: ServerConfig | None = None,
        tokenizer: Tokenizer = TOKENIZER,
        sampling_defaults: SamplingDefaults = NEUTRAL,
        engine: EngineConfig = ENGINE,
    ) -> None:
        self.tokenizer = tokenizer
        self.runner = runner or FakeRunner(make_info(), hit=0.7)
        self.config = config or ServerConfig(port=0)
        self.engine_config = replace(engine, sampling_defaults=sampling_defaults)
        self.server = Server(self.config, engine, self._load)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.engine: Engine | None = None

    def _load(self, on_death: Callable[[Exception], None]) -> LoadedModel:
        self.engine = self.engine_type(lambda: self.runner, self.engine_config, (END,), on_death)
        return LoadedModel(self.engine, self.tokenizer, FACTS)

    @property
    def port(self) -> int:
        return int(self.server.listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._port = self.port
        self.thread.start()
        until(lambda: self.engine is not None and self._ready())
        return self

    def _ready(self) -> bool:
        try:
            key = {"x-api-key": self.config.api_keys[0]} if self.config.api_keys else {}
            return httpx.get(f"{self.url}/ready", headers=key, timeout=WAIT).status_code == 200
        except httpx.ConnectError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.runner, GatedRunner):
            self.runner.fuel.put(None)
        if self.thread.is_alive():
            self.server.stop()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=WAIT)

    def finished(self, reason: str) -> int:
        assert self.engine is not None
        return self.engine.snapshot().finished.get(reason, 0)


def until(what: Callable[[], bool], seconds: float = WAIT) -> None:
    """Waits for it to come true; a slow machine only makes it later."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def events(lines: Iterator[str]) -> list[dict[str, Any]]:
    """The JSON of a stream's data lines; [DONE] and comments left out."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def raw_post(
    port: int, path: str, body: dict[str, Any], sent: int | None = None, room: int | None = None
) -> socket.socket:
    """A connection on which a request was sent, or only ``sent`` bytes of its body. The answer is not read.

    ``room``: bytes of it that the system keeps for us.
    """
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection = socket.socket()
    connection.settimeout(WAIT)
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + b"\r\n\r\n" + data[:sent])
    return connection
