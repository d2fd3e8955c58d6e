"""llama.cpp beside us, in the same run: the same GGUF, the same prompts, the same number of threads.

Driven through the PyPI package xllamacpp, which holds llama.cpp's own server. Between its turns it waits without
spinning, as our engine does. Knows token ids, not text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.runners.torch.cpu.ops import available_threads

PACKAGE = "xllamacpp"


@dataclass(frozen=True, slots=True)
class Answer:
    num_tokens: int  # the end token included, as with us
    decode_seconds: float  # after the first token


class Peer:
    def __init__(self, server: Any, count: int, note: str) -> None:
        self.note = note  # one line for people: what was built and how it runs
        self._server = server
        self._threads = ThreadPoolExecutor(count)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
        """Greedy answers to all prompts, ``count`` at a time, each up to the model's end token."""
        return list(self._threads.map(lambda tokens: self._answer(tokens, num_tokens), prompts))

    def _answer(self, tokens: Sequence[int], num_tokens: int) -> Answer:
        asked = {"prompt": list(tokens), "max_tokens": num_tokens, "temperature": 0, "cache_prompt": False}
        told = self._server.handle_completions({**asked, "stream": False})
        if "timings" not in told:
            raise ConfigError(f"llama.cpp refused a prompt of {len(tokens)} tokens: {told}")
        return Answer(int(told["timings"]["predicted_n"]), told["timings"]["predicted_ms"] / 1e3)

    def close(self) -> None:
        self._threads.shutdown()
        self._server = None  # its destructor ends the server


@contextmanager
def open_peer(path: Path, count: int, wanted: bool, context: int = 1024) -> Iterator[Peer | None]:
    """llama.cpp with ``count`` slots of ``context`` tokens each; None if nobody wants it."""
    if not wanted:
        yield None
        return
    package = _package()
    peer = Peer(_server(package, path, count, context), count, _note(package))
    try:
        yield peer
    finally:
        peer.close()


def _package() -> Any:
    try:
        return import_module(PACKAGE)
    except ImportError as error:
        raise ConfigError(f"--peer needs llama.cpp: pip install {PACKAGE}") from error


def _note(package: Any) -> str:
    built = re.findall(r"(\w+) = 1", package.get_system_info())
    return f"{PACKAGE} {package.__version__} on {available_threads()} threads, built with {' '.join(built)}"


def _server(package: Any, path: Path, count: int, context: int) -> Any:
    if path.suffix != ".gguf":
        raise ConfigError(f"llama.cpp reads GGUF files only, and {path} is none: leave out --peer")
    params = package.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = count, count * context
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = available_threads()
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.verbosity = 0
    try:
        return package.Server(params)
    except RuntimeError as error:
        raise ConfigError(f"llama.cpp cannot open {path}: {error}") from error
