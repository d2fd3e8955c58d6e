"""The scenarios of many requests at once: `fan-out`, which share a prefix, and `cold`, which share nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.bench.conversations.chat import ChatPrompt, words_of
from slipstream.bench.conversations.settings import SUFFIX, TurnsSettings, alternating, request
from slipstream.bench.harness.traffic import StreamLog, percentile, run_together
from slipstream.commands.progress import shown
from slipstream.engine.request import PromptCache
from slipstream.llm import LLM


@dataclass(frozen=True, slots=True)
class CrowdResult:
    """One round of one side."""

    cached: bool  # with the prefix cache
    prompt_tokens: int
    read_tokens: int
    first_ms: tuple[float, ...]  # by stream, rising
    tok_s: float  # output tokens over the time from the first submission to the last token
    tokens: tuple[tuple[int, ...], ...]

    @property
    def median_first_ms(self) -> float:
        return percentile(self.first_ms, 50)


def fan_out(llm: LLM, settings: TurnsSettings) -> list[CrowdResult]:
    """Each round has a prefix of its own, which nobody has sent before."""
    return _rounds(llm, settings, "fan-out", shared=True)


def cold(llm: LLM, settings: TurnsSettings) -> list[CrowdResult]:
    """What the cache costs where it is of no use: both sides with prompts of their own."""
    return _rounds(llm, settings, "cold", shared=False)


def _rounds(llm: LLM, settings: TurnsSettings, name: str, *, shared: bool) -> list[CrowdResult]:
    rows = []
    words = words_of(llm, settings.seed + 2 + shared)
    for turn in shown(range(settings.repeats), name):
        prefix = words(settings.prompt if shared else 1)
        length = SUFFIX if shared else settings.prompt - 1
        prompts = [
            ChatPrompt(prefix + words(length), PromptCache(salt=f"{name} {turn}")) for _ in range(settings.streams)
        ]
        rows += [_round(llm, prompts, settings.new, cached=cached) for cached in alternating(turn)]
    return rows


def _round(llm: LLM, prompts: Sequence[ChatPrompt], num_new: int, *, cached: bool) -> CrowdResult:
    logs = run_together(llm.engine, [request(prompt, num_new, cached=cached) for prompt in prompts])
    seconds = max(log.end for log in logs) - min(log.submitted for log in logs)
    total = sum(log.num_prompt for log in logs)
    return CrowdResult(
        cached,
        total,
        total - sum(log.stats.cached_tokens for log in logs),
        tuple(sorted(_since_first(log, logs) for log in logs)),
        round(sum(log.num_tokens for log in logs) / seconds, 2),
        tuple(tuple(log.tokens) for log in logs),
    )


def _since_first(log: StreamLog, logs: Sequence[StreamLog]) -> float:
    return round(1e3 * (log.first - min(each.submitted for each in logs)), 2)


def summary(rows: Sequence[CrowdResult], settings: TurnsSettings, *, shared: bool) -> dict[str, object]:
    """Medians over the rounds; ratios are of one round's neighbours."""
    ours, plain = ([row for row in rows if row.cached == cached] for cached in (True, False))
    pairs = list(zip(ours, plain, strict=True))
    found: dict[str, object] = {
        "first_ms": median(row.median_first_ms for row in ours),
        "first_ms_off": median(row.median_first_ms for row in plain),
        "tok_s_ratio": round(median(a.tok_s / b.tok_s for a, b in pairs), 3),
        "first_token_ratio": round(median(b.median_first_ms / a.median_first_ms for a, b in pairs), 3),
        "read_tokens": round(median(row.read_tokens for row in ours)),
        "same_texts": sum(x == y for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=True)),
        "texts": sum(len(a.tokens) for a in ours),
    }
    if shared:
        once = settings.prompt + settings.streams * SUFFIX
        found["read_over_once"] = round(median(row.read_tokens / once for row in ours), 3)
        found["last_over_first"] = round(median(row.first_ms[-1] / row.first_ms[0] for row in ours), 3)
    return found
