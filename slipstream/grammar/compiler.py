"""Specs -> constraints, for any thread: bounded, tried in a process of its own first, and kept.

A hostile spec costs its caller the time of the trial. Streams feel it where cores are few, so behind a trial that took
long comes a rest, in which only specs that are known already are served. What was refused is remembered too.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import llguidance

from slipstream.errors import GrammarError
from slipstream.grammar.build import Unusable, compiled
from slipstream.grammar.matcher import Grammar
from slipstream.grammar.specs import Source, Spec
from slipstream.grammar.trial import TrialFailed, Trials
from slipstream.grammar.vocabulary import vocabulary_of
from slipstream.sampling.constraints import Constraint

if TYPE_CHECKING:
    from slipstream.load.tokenizer.tokenizer import Tokenizer


LONG_SECONDS = 0.3  # what hardly any honest spec takes
REST = 4.0  # times as long as a long trial took, nothing is tried behind it


class GrammarCompiler:
    def __init__(
        self, tokenizer: Tokenizer, *, seconds: float = 10.0, wait_seconds: float = 60.0, num_kept: int = 64
    ) -> None:
        """``seconds``: for one trial. ``wait_seconds``: for others' trials before it."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._wait_seconds = wait_seconds
        self._num_kept = num_kept
        self._kept: OrderedDict[Source, Grammar | Unusable] = OrderedDict()
        self._gate = threading.Lock()  # of what is kept; never held for long
        self._turn = threading.Lock()  # one trial at a time
        self._rest_until = 0.0  # belongs to whose turn it is
        self._closing = threading.Event()
        self._trials: Trials | None = None
        self._compiled: llguidance.LLTokenizer | None = None

    def compile(self, spec: Spec, where: str | None = None) -> Constraint:
        """Blocks. Raises GrammarError that begins with ``where`` (the field it came from) and the place inside."""
        where = where or spec.name
        source = spec.source(where)
        result = self._look(source) or self._make(source)
        if isinstance(result, Unusable):
            raise GrammarError(f"{where}{result.path}: {result}")
        return result

    def close(self) -> None:
        self._closing.set()
        with self._turn:
            if self._trials is not None:
                self._trials.close()

    def _look(self, source: Source) -> Grammar | Unusable | None:
        with self._gate:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _make(self, source: Source) -> Grammar | Unusable:
        if not self._turn.acquire(timeout=self._wait_seconds):
            raise GrammarError("too many grammars are being compiled; try again later")
        try:
            result = self._look(source) or self._compile_rested(source)
        finally:
            self._turn.release()
        with self._gate:
            self._kept[source] = result
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        return result

    def _compile_rested(self, source: Source) -> Grammar | Unusable:
        """Even where cores are few, whoever sends one hard spec after the other takes a fifth of one at most."""
        self._closing.wait(max(0.0, self._rest_until - time.monotonic()))
        if self._trials is None:
            vocabulary = vocabulary_of(self._tokenizer)
            self._compiled = vocabulary.compiled()
            self._trials = Trials(vocabulary.tokens, vocabulary.special_token_ids)
        try:
            return self._compile(source)
        finally:
            if self._trials.seconds > LONG_SECONDS:
                self._rest_until = time.monotonic() + REST * self._trials.seconds

    def _compile(self, source: Source) -> Grammar | Unusable:
        assert self._trials is not None
        assert self._compiled is not None
        try:
            answer = self._trials.run(source, self._seconds)
            if "error" in answer:
                return Unusable(answer["error"], answer["path"])
            matcher = compiled(self._compiled, answer["grammar"])
        except TrialFailed:
            return Unusable(f"too complex: not compiled within {self._seconds:g} seconds and bounded memory")
        except Unusable as error:
            return error
        return Grammar(matcher, self._tokenizer.vocab_size, self._tokenizer.eos_token_ids)
