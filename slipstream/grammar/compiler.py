"""Specs -> constraints, for any thread: bounded, tried in a process of its own first, cached.

A hostile spec costs its caller the time of the trial. With few cores it slows the streams too, so a long trial is
followed by a pause, during which only cached specs are served. Refusals are cached like grammars.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import llguidance

from slipstream.errors import GrammarError, GrammarsUnavailable
from slipstream.grammar.build import Unusable, compiled
from slipstream.grammar.matcher import Grammar
from slipstream.grammar.specs import Source, Spec
from slipstream.grammar.vocabulary import GuidanceVocabulary, guidance_vocabulary
from slipstream.sampling.constraints import Constraint
from slipstream.workers.process import Crashed, OutOfTime, Unavailable, WorkerProcess

if TYPE_CHECKING:
    from slipstream.load.tokenizer.tokenizer import Tokenizer


LONG_SECONDS = 0.3  # hardly any honest spec takes as long
PATIENCE = 4.0  # seconds of the clock for one of processor time: trials give way to streams, and may get little
PAUSE_FACTOR = 4.0  # the pause after a long trial, in multiples of its time


class GrammarCompiler:
    def __init__(
        self, tokenizer: Tokenizer, *, seconds: float = 10.0, wait_seconds: float = 60.0, max_cached: int = 64
    ) -> None:
        """``seconds``: of processor time for one trial. ``wait_seconds``: for others' trials before it."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._wait_seconds = wait_seconds
        self._max_cached = max_cached
        self._cache: OrderedDict[Source, Grammar | Unusable] = OrderedDict()
        self._cache_lock = threading.Lock()  # never held for long
        self._trial_lock = threading.Lock()  # one trial at a time
        self._pause_until = 0.0  # guarded by _trial_lock
        self._closing = threading.Event()
        self._trial: WorkerProcess | None = None
        self._compiled: llguidance.LLTokenizer | None = None

    def compile(self, spec: Spec, where: str | None = None) -> Constraint:
        """Blocks. Raises GrammarError that begins with ``where`` (the request's field) and the path inside."""
        where = where or spec.name
        source = spec.source(where)
        result = self._cached(source) or self._make(source)
        if isinstance(result, Unusable):
            raise GrammarError(f"{where}{result.path}: {result}")
        return result

    def close(self) -> None:
        """Ends the pause and the trial that is running."""
        self._closing.set()
        if (trial := self._trial) is not None:
            trial.close()

    def _cached(self, source: Source) -> Grammar | Unusable | None:
        with self._cache_lock:
            if source in self._cache:
                self._cache.move_to_end(source)
            return self._cache.get(source)

    def _make(self, source: Source) -> Grammar | Unusable:
        if not self._trial_lock.acquire(timeout=self._wait_seconds):
            raise GrammarError("too many grammars are being compiled; try again later")
        try:
            result = self._cached(source) or self._compile_paced(source)
        finally:
            self._trial_lock.release()
        with self._cache_lock:
            self._cache[source] = result
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        return result

    def _compile_paced(self, source: Source) -> Grammar | Unusable:
        """With the pause, a client that sends one hard spec after the other takes at most a fifth of a core."""
        self._closing.wait(max(0.0, self._pause_until - time.monotonic()))
        if self._trial is None:
            vocabulary = guidance_vocabulary(self._tokenizer)
            self._compiled = vocabulary.compiled()
            self._trial = _trial_process(vocabulary)
        try:
            return self._compile(source)
        finally:
            if self._trial.seconds > LONG_SECONDS:
                self._pause_until = time.monotonic() + PAUSE_FACTOR * self._trial.seconds

    def _compile(self, source: Source) -> Grammar | Unusable:
        assert self._trial is not None
        assert self._compiled is not None
        try:
            answer = self._trial.ask(source, PATIENCE * self._seconds, cpu_seconds=self._seconds)
            if "error" in answer:
                return Unusable(answer["error"], answer["path"])
            matcher = compiled(self._compiled, answer["grammar"])
        except (OutOfTime, Crashed):
            return Unusable(f"too complex: not compiled within {self._seconds:g} seconds and bounded memory")
        except Unavailable as error:
            raise GrammarsUnavailable(f"the process that tries grammars is not available: {error}") from error
        except Unusable as error:
            return error
        return Grammar(matcher, self._tokenizer.vocab_size, self._tokenizer.eos_token_ids)


def _trial_process(vocabulary: GuidanceVocabulary) -> WorkerProcess:
    tokens = [token.decode("latin-1") for token in vocabulary.tokens]
    return WorkerProcess("slipstream.grammar.worker", {"tokens": tokens, "special": list(vocabulary.special_token_ids)})
