"""llama.cpp beside us, in the same run: the same GGUF, the same prompts, the same number of threads.

Driven through the PyPI package xllamacpp, which holds llama.cpp's own server. It waits without work between its turns,
as our engine does. Knows token ids, not text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.runners.torch.cpu.ops import available_threads

PACKAGE = "xllamacpp"


class Peer:
    def __init__(self, server: Any, count: int) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(count)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Greedy answers to all prompts, ``count`` at a time. Returns how many tokens were predicted."""
        return sum(self._threads.map(lambda tokens: self.answer(tokens, num_tokens), prompts))

    def answer(self, tokens: Sequence[int], num_tokens: int) -> int:
        """Tokens of one answer. It ends at the model's end token, which counts as it does with us."""
        asked = {
            "prompt": list(tokens),
            "max_tokens": num_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "stream": False,
        }
        told = self._server.handle_completions(asked)
        if "timings" not in told:
            raise ConfigError(f"llama.cpp refused a prompt of {len(tokens)} tokens: {told}")
        return int(told["timings"]["predicted_n"])

    def close(self) -> None:
        self._threads.shutdown()
        self._server = None


@contextmanager
def open_peer(path: Path, count: int, wanted: bool, context: int = 1024) -> Iterator[Peer | None]:
    """llama.cpp with ``count`` slots of ``context`` tokens each; None if nobody wants it."""
    if not wanted:
        yield None
        return
    peer = Peer(_server(path, count, context), count)
    try:
        yield peer
    finally:
        peer.close()


def _server(path: Path, count: int, context: int) -> Any:
    if path.suffix != ".gguf":
        raise ConfigError(f"llama.cpp reads GGUF files only, and {path} is none: leave out --peer")
    try:
        package = import_module(PACKAGE)
    except ImportError as error:
        raise ConfigError(f"--peer needs llama.cpp: pip install {PACKAGE}") from error
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
