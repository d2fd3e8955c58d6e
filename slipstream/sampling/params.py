"""The sampling parameters of a request.

The meaning, in order, at the position after history ``h`` (prompt, output and the drafts before it, each once):
repetition, presence and frequency penalties from ``h``; logit_bias; then tokens that may not follow ``h`` are masked
(constraint, bad_words, min_tokens); temperature; top_k; top_p; min_p; then one sample whose randomness depends on
(seed, position) alone. temperature 0 is the largest logit that is left. Log-probabilities are those of the model
itself, before any of this. Knows no array library: runners implement it, this file defines and validates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from slipstream.errors import ParamsError
from slipstream.sampling.constraints import Constraint

DraftSetting = Literal["off", "solo", "adaptive"] | int
MAX_DEPTH = 8
MAX_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 1024

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


def check_draft(value: object) -> DraftSetting:
    """A draft policy by name or a fixed depth, or a ParamsError that says what is allowed."""
    if isinstance(value, str) and value in ("off", "solo", "adaptive"):
        return value  # type: ignore[return-value]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DEPTH:
        return value
    raise ParamsError(f"draft must be 'off', 'solo', 'adaptive' or a depth from 0 to {MAX_DEPTH}, not {value!r}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one per request
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False
    max_tokens: int | None = 256  # None: up to the context limit
    min_tokens: int = 0  # no end token is sampled before this many
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that are never completed
    constraint: Constraint | None = None  # on the whole output
    logprobs: int | None = None  # report each token's log-probability, and those of this many likeliest ones
    prompt_logprobs: int | None = None  # the same for the prompt's tokens after the first
    draft: DraftSetting | None = None  # None: the engine's policy
    p_min: float | None = None  # stop drafting below this confidence; None: the engine's

    def __post_init__(self) -> None:
        self._check_number("temperature", 0.0, 100.0)
        self._check_number("top_p", 0.0, 1.0, open_low=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_number("presence_penalty", -100.0, 100.0)
        self._check_number("frequency_penalty", -100.0, 100.0)
        self._check_int("top_k", 0, 1 << 31)
        if self.max_tokens is not None:
            self._check_int("max_tokens", 1, 1 << 31)
        self._check_int("min_tokens", 0, 1 << 31 if self.max_tokens is None else self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            self._check_int("seed", -(1 << 63), (1 << 64) - 1)
        if self.p_min is not None:
            self._check_number("p_min", 0.0, 1.0)
        if self.draft is not None:
            check_draft(self.draft)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        if len(self.logit_bias) > MAX_BIAS:
            raise ParamsError(f"logit_bias may name at most {MAX_BIAS} tokens, not {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0 or not -1000.0 <= bias <= 1000.0:
                raise ParamsError(f"logit_bias maps token ids to numbers from -1000 to 1000, not {token!r}: {bias!r}")
        if any(not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise ParamsError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        object.__setattr__(self, "bad_words", tuple(map(tuple, self.bad_words)))
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ParamsError(f"at most {MAX_BAD_WORDS} bad_words, not {len(self.bad_words)}")
        if any(not word or any(not isinstance(t, int) or t < 0 for t in word) for word in self.bad_words):
            raise ParamsError("bad_words must be runs of token ids, none of them empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def inverse_temperature(self) -> float:
        return min(1e6, 1.0 / max(self.temperature, 1e-9))

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p is in effect."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_history(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value > high or value < low or (open_low and value == low):
            bounds = f"{'more than' if open_low else 'from'} {low:g} {'up to' if open_low else 'to'} {high:g}"
            raise ParamsError(f"{name} must be a number {bounds}, not {value!r}")

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ParamsError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
