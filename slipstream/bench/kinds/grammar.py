"""`slipstream bench grammar`: what constraints cost, what is accepted under them, and what their neighbours feel.

Half of the streams write JSON under a schema that never ends, the other half is plain; against the same batch with the
same questions, all plain. All draft at one depth, so that steps have the same shape: what differs is the grammar.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from slipstream.bench.harness.loaded_engine import loaded, with_room
from slipstream.bench.harness.mixed_traffic import per_stream
from slipstream.bench.harness.report import check_writable, headline, write_report
from slipstream.bench.harness.traffic import StreamLog, StreamRequest, run_together
from slipstream.bench.harness.workload import prompts
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import shown
from slipstream.errors import ConfigError
from slipstream.grammar import JsonSchema
from slipstream.llm import LLM
from slipstream.sampling import Constraint, Matcher, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "known", "trusted"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 10_000}
QUESTION = "Invent many people: name, age, tags and home. Answer with a JSON list."


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    streams: int = 8
    depth: int = 2
    temperature: float = 1.0
    new: int = 128
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.streams < 2 or min(self.new, self.repeats) < 1:
            raise ConfigError("streams must be at least 2, new and repeats at least 1")


class Timed:
    """A constraint, and what its matchers took of the engine's time."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self.seconds = 0.0

    def start(self, vocab_size: int, end_tokens: Collection[int]) -> Matcher:
        return _TimedMatcher(self._inner.start(vocab_size, end_tokens), self)


class _TimedMatcher:
    def __init__(self, inner: Matcher, account: Timed) -> None:
        self._inner = inner
        self._account = account

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        began = time.perf_counter()
        try:
            return self._inner.masks(drafts)
        finally:
            self._account.seconds += time.perf_counter() - began

    def advance(self, tokens: Sequence[int]) -> None:
        began = time.perf_counter()
        self._inner.advance(tokens)
        self._account.seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class GrammarRound:
    """One turn of both batches."""

    alone_tok_s: float | None  # of a plain stream among plain ones
    beside_tok_s: float | None  # of a plain stream beside constrained ones
    mask_ms: float  # of one constrained row in one step
    step_ms: float  # between the tokens of a constrained stream
    constrained_accepted: float
    plain_accepted: float

    @property
    def kept(self) -> float | None:
        return self.beside_tok_s / self.alone_tok_s if self.alone_tok_s and self.beside_tok_s else None


def grammar(options: ModelOptions, settings: GrammarSettings, to: ReportOptions) -> int:
    check_writable(to)
    sized = with_room(options, [settings.new + 256] * settings.streams)
    with loaded(sized) as (llm, _):
        print(headline(options, llm.engine.info))
        began = time.perf_counter()
        timed = Timed(llm.constraint(JsonSchema(SCHEMA)))
        compile_ms = 1e3 * (time.perf_counter() - began)
        turns = shown(range(1 + settings.repeats), "rounds")
        rounds = [_round(llm, settings, timed) for _ in turns][1:]  # the first is not looked at
    summary = {"compile_ms": round(compile_ms, 1), **_medians(rounds)}
    _print(summary, settings)
    write_report(
        "grammar", options, to, {"settings": asdict(settings), **summary, "rounds": [asdict(each) for each in rounds]}
    )
    return 0


def _round(llm: LLM, settings: GrammarSettings, timed: Timed) -> GrammarRound:
    half = settings.streams // 2
    plain = [StreamRequest(prompt, _params(settings, i)) for i, prompt in enumerate(prompts(llm, half, None))]
    question = llm.chat_tokens([{"role": "user", "content": QUESTION}])
    others = range(half, settings.streams)
    alone = run_together(llm.engine, [*plain, *(StreamRequest(question, _params(settings, i)) for i in others)])
    timed.seconds = 0.0
    beside = run_together(llm.engine, [*plain, *(StreamRequest(question, _params(settings, i, timed)) for i in others)])
    rows = beside[half:]
    num_steps = sum(log.stats.steps for log in rows)
    return GrammarRound(
        per_stream(alone, alone[:half]),
        per_stream(beside, beside[:half]),
        round(1e3 * timed.seconds / num_steps, 4),
        round(1e3 * sum(log.end - log.first for log in rows) / num_steps, 3),
        _accepted(rows),
        _accepted(alone[half:]),
    )


def _params(settings: GrammarSettings, seed: int, constraint: Constraint | None = None) -> SamplingParams:
    return SamplingParams(
        settings.temperature,
        seed=seed,
        max_tokens=settings.new,
        ignore_eos=True,
        draft=settings.depth,
        constraint=constraint,
    )


def _accepted(logs: Sequence[StreamLog]) -> float:
    drafted = sum(log.stats.draft_tokens for log in logs)
    return round(sum(log.stats.accepted_tokens for log in logs) / drafted, 4) if drafted else 0.0


def _medians(rounds: Sequence[GrammarRound]) -> dict[str, float | None]:
    names = ("alone_tok_s", "beside_tok_s", "kept", "mask_ms", "step_ms", "constrained_accepted", "plain_accepted")
    found: dict[str, float | None] = {}
    for name in names:
        values = [value for each in rounds if (value := getattr(each, name)) is not None]
        found[name] = round(median(values), 4) if values else None
    return found


def _print(summary: dict[str, float | None], settings: GrammarSettings) -> None:
    half = settings.streams - settings.streams // 2
    print(f"{half} of {settings.streams} streams under a JSON schema, depth {settings.depth}; medians")
    print(f"compiling it: {summary['compile_ms']} ms, once")
    print(f"masks: {summary['mask_ms']} ms of a constrained row's step, which comes every {summary['step_ms']} ms")
    print(f"drafts accepted: {summary['constrained_accepted']} constrained, {summary['plain_accepted']} plain")
    print(
        f"a plain stream: {summary['beside_tok_s']} tokens a second beside them, "
        f"{summary['alone_tok_s']} among plain ones; kept {summary['kept']}"
    )
