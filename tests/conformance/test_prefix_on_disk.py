"""The prefix cache on disk: a new process goes on where the last one ended, and a damaged file is only a miss."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import tiny
from harness import open_runner

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import PromptCache, TokenEvent
from slipstream.load import OpenedModel
from slipstream.load.fingerprint import fingerprint
from slipstream.load.hf.folder import open_hf
from slipstream.runners.torch.backend import TorchBackend
from slipstream.sampling import SamplingParams

KINDS = ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"]
PROMPT = tuple(7 * i % 89 for i in range(401))
HOST = 6_000_000


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[object, ...]
    num_cached: int


class Server:
    """An engine over a folder of cached prompts, as a process would have it."""

    def __init__(self, model: Path, folder: Path, fingerprint: str = "this model", kv_dtype: str = "auto") -> None:
        config = EngineConfig(max_streams=4, block_size=8, cache_dir=str(folder), cache_host=HOST)
        options = {"cache_host": HOST, "kv_dtype": kv_dtype}
        load = partial(open_runner, model, head=True, kernels=True, **options)  # type: ignore[arg-type]
        self._engine = Engine(load, config, fingerprint=fingerprint)

    def __enter__(self) -> Server:
        self._engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def ask(self, prompt: tuple[int, ...], cache: PromptCache | None = None, count: int = 16) -> Answer:
        events: queue.Queue[TokenEvent] = queue.Queue()
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=count, logprobs=1)
        self._engine.submit_many(prompt, params, [events.put], cache=cache or PromptCache())
        tokens: tuple[int, ...] = ()
        logprobs: tuple[object, ...] = ()
        while True:
            event = events.get(timeout=60)
            tokens, logprobs = tokens + event.tokens, logprobs + event.logprobs
            if event.finish_reason:
                assert event.stats is not None
                return Answer(tokens, logprobs, event.stats.cached_tokens)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


@pytest.mark.parametrize(
    ("kind", "kv_dtype"), [*((kind, "auto") for kind in KINDS), *((kind, "fp8") for kind in KINDS)]
)
def test_a_restart(tmp_path: Path, kind: str, kv_dtype: str) -> None:
    model, folder = tiny.save(tiny.build(kind), tmp_path / "model", head=True), tmp_path / "cache"
    with Server(model, folder, kv_dtype=kv_dtype) as server:
        first = server.ask(PROMPT)
        told = (*PROMPT, *first.tokens, 5, 6)
        cold = server.ask(told, PromptCache(enabled=False))
    assert files(folder)
    size = sum(path.stat().st_size for path in files(folder))
    assert size < 1.3 * max(path.stat().st_size for path in files(folder)), "nothing is written twice"
    with Server(model, folder, kv_dtype=kv_dtype) as server:
        warm = server.ask(told)
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
        assert warm.num_cached >= 0.95 * len(PROMPT)
        other = server.ask(told, PromptCache(salt="another"))
        assert (other.tokens, other.num_cached) == (cold.tokens, 0)
    with Server(model, folder, "another model", kv_dtype) as server:
        assert server.ask(told).num_cached == 0


def test_caches_in_another_type_are_misses(tmp_path: Path) -> None:
    """By the size of their blocks; and by the fingerprint, as the server makes it."""
    model, folder = tiny.save(tiny.build("llama-gqa-tied"), tmp_path / "model", head=True), tmp_path / "cache"
    for kv_dtype in ("auto", "fp8", "auto", "fp8"):
        known = bool(files(folder)) and len(files(folder)) > 1
        with Server(model, folder, kv_dtype=kv_dtype) as server:
            assert (server.ask(PROMPT).num_cached > 0) == known
    checkpoint = open_hf(model)
    opened = OpenedModel("tiny", model, checkpoint, checkpoint, "")
    notes = [TorchBackend(RunnerConfig("cpu", kv_dtype=each)).describe(opened) for each in ("auto", "fp8")]
    assert fingerprint(opened, {"backend": notes[0]}) != fingerprint(opened, {"backend": notes[1]})


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_changed_byte_is_a_miss(tmp_path: Path, kind: str) -> None:
    model, folder = tiny.save(tiny.build(kind), tmp_path / "model", head=True), tmp_path / "cache"
    with Server(model, folder) as server:
        first = server.ask(PROMPT)
    for path in files(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with Server(model, folder) as server:
        again = server.ask(PROMPT)
        assert (again.tokens, again.num_cached) == (first.tokens, 0)
    with Server(model, folder) as server:
        again = server.ask(PROMPT)
        assert again.tokens == first.tokens
        assert again.num_cached >= 0.9 * len(PROMPT), "it was written anew"


def test_a_fault_of_the_store_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: nobody waits for it."""
    model, folder = tiny.save(tiny.build("qwen3_5"), tmp_path / "model", head=True), tmp_path / "cache"
    with Server(model, folder) as server:
        first = server.ask(PROMPT)

    def fail(*arguments: object) -> bool:
        raise MemoryError("too much")

    with monkeypatch.context() as patched, Server(model, folder) as server:
        patched.setattr("slipstream.cache.disk_store.DiskStore.read", fail)
        patched.setattr("slipstream.cache.disk_store.DiskStore.write", fail)
        for _ in range(2):
            assert server.ask(PROMPT, PromptCache(salt="")).tokens == first.tokens
