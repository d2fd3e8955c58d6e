"""llama.cpp beside us, in the same run: the same GGUF, the same prompts, the same number of threads.

It runs in a process of its own (llamacpp.py) through the PyPI package xllamacpp. Between its turns it waits without
spinning, as our engine does. Knows token ids, not text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.bench.harness.traffic import TokenTimes
from slipstream.errors import ConfigError
from slipstream.host import available_threads

PACKAGE = "xllamacpp"
END_SECONDS = 10


class LlamaCppAnswer(TokenTimes):
    """The end token counts, as with us."""

    def __init__(
        self, submitted: float, times: list[float], counts: list[int], likeliest: list[list[tuple[int, float]]]
    ) -> None:
        super().__init__(submitted, times, counts)
        self.likeliest = likeliest  # at each position tokens and log-probabilities, if requested

    @property
    def decode_seconds(self) -> float:
        return self.end - self.first


class LlamaCppPeer:
    """llama.cpp with ``count`` slots of ``context`` tokens each."""

    def __init__(self, path: Path, count: int, context: int, *, caching: bool = False) -> None:
        """``caching``: it keeps what it computed of a prompt for prompts that begin alike."""
        numbers = (count, context, available_threads(), int(caching))
        command = [sys.executable, "-m", "slipstream.bench.harness.llamacpp", str(path), *map(str, numbers)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        try:
            self.note = _note(path, self._read())  # one line for people: what was built and how it runs
        except ConfigError:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, ignore_eos: bool = False, num_likeliest: int = 0
    ) -> list[LlamaCppAnswer]:
        """Greedy answers to all prompts, ``count`` at a time, each up to the model's end token."""
        assert self.process.stdin is not None
        options = {"max_tokens": num_tokens, "ignore_eos": ignore_eos, "n_probs": num_likeliest}
        line = json.dumps({**options, "prompts": [list(tokens) for tokens in prompts]})
        print(line, file=self.process.stdin, flush=True)
        return [_answer(each) for each in self._read()]

    def close(self) -> None:
        """An end of input ends it."""
        try:
            self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError(f"llama.cpp ended with exit code {self.process.wait()}")
        return json.loads(line)


def _answer(reply: dict[str, Any]) -> LlamaCppAnswer:
    if "error" in reply:
        raise ConfigError(f"llama.cpp cannot answer: {reply['error']}")
    return LlamaCppAnswer(**reply)


def _note(path: Path, reply: dict[str, str]) -> str:
    if "error" in reply:
        raise ConfigError(f"llama.cpp cannot open {path}: {reply['error']}")
    return reply["note"]


def check_peer(path: Path) -> None:
    """Raises ConfigError for what no file's contents could cure."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(f"llama.cpp is not here to compare with: pip install {PACKAGE}")
    if path.suffix != ".gguf":
        raise ConfigError(f"llama.cpp reads GGUF files only, and {path} is none: it cannot be compared with")


@contextmanager
def open_peer(
    path: Path, count: int, wanted: bool, context: int = 1024, *, caching: bool = False
) -> Iterator[LlamaCppPeer | None]:
    """None if it is not wanted."""
    if not wanted:
        yield None
        return
    check_peer(path)
    peer = LlamaCppPeer(path, count, context, caching=caching)
    try:
        yield peer
    finally:
        peer.close()
