"""How a choice finished, its usage, its speed and its draft counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from slipstream.engine.stats import RequestStats


@dataclass(frozen=True, slots=True)
class Finish:
    reason: Literal["stop", "length", "tool_calls", "error"]
    stop: str | None  # the stop string that ended it, if any
    num_prompt: int
    num_output: int  # tokens up to the end; the engine may have sampled a few more after a stop string
    stats: RequestStats
    num_thinking: int = 0  # tokens, included in num_output
    error: str = ""  # for reason "error"
    num_choices: int = 1  # that this is the sum of

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return min(self.stats.cached_tokens, self.num_prompt)

    @property
    def num_read(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.num_prompt - self.num_cached

    def timings(self) -> dict[str, Any]:
        """With the field names of llama.cpp's server. ``predicted_ms`` begins at the first token."""
        stats = self.stats
        queue = stats.queue_seconds or 0.0
        first = stats.total_seconds if stats.first_token_seconds is None else stats.first_token_seconds
        reading, writing = first - queue, stats.total_seconds - first
        return {
            "queue_ms": _ms(queue),
            "prompt_n": self.num_read,
            "prompt_ms": _ms(reading),
            "prompt_per_second": _rate(self.num_read, reading),
            "cached_tokens": self.num_cached,
            "cache_note": stats.cache_note,
            "predicted_n": self.num_output,
            "predicted_ms": _ms(writing),
            "predicted_per_second": _rate(stats.output_tokens - 1, writing),
            "gain": None if stats.gain is None else round(stats.gain, 3),
            "draft_n": stats.draft_tokens,
            "draft_n_accepted": stats.accepted_tokens,
            "drafted_per_position": list(stats.drafted_per_position),
            "accepted_per_position": list(stats.accepted_per_position),
            "tokens_per_step": round(stats.tokens_per_step, 3),
            "speculation": stats.speculation,
        }

    def metrics(self) -> dict[str, Any]:
        """The field `metrics` in vLLM's shape; like there, only of a single choice and where the model drafts."""
        stats = self.stats
        if self.num_choices > 1 or not stats.max_depth:
            return {}
        spec = {
            "mean_acceptance_length": stats.mean_accepted_length,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": list(stats.acceptance_histogram),
            "num_spec_steps": stats.drafts,
            "num_accepted_draft_tokens": stats.accepted_tokens,
            "num_draft_tokens": stats.draft_tokens,
            "num_spec_tokens": stats.max_depth,
        }
        return {"metrics": {"speculative_decoding": spec}}


def total(finishes: Sequence[Finish], num_prompts: int = 1) -> Finish:
    """The sum over the choices of a request: tokens and drafts added, time from the first start to the last end.

    Each prompt counts once, by the first of its choices, which computes it.
    """
    first, stats = finishes[0], [finish.stats for finish in finishes]
    by_prompt = finishes[:: len(finishes) // num_prompts]
    if len(finishes) == 1:
        return first
    merged = replace(
        stats[0],
        output_tokens=sum(each.output_tokens for each in stats),
        drafts=sum(each.drafts for each in stats),
        steps=sum(each.steps for each in stats),
        plain_steps=sum(each.plain_steps for each in stats),
        why_plain=max(stats, key=lambda each: each.plain_steps).why_plain,
        draft_tokens=sum(each.draft_tokens for each in stats),
        accepted_tokens=sum(each.accepted_tokens for each in stats),
        drafted_per_position=_added(each.drafted_per_position for each in stats),
        accepted_per_position=_added(each.accepted_per_position for each in stats),
        queue_seconds=min((each.queue_seconds for each in stats if each.queue_seconds is not None), default=None),
        first_token_seconds=min(
            (s.first_token_seconds for s in stats if s.first_token_seconds is not None), default=None
        ),
        total_seconds=max(each.total_seconds for each in stats),
        cached_tokens=sum(each.num_cached for each in by_prompt),
        cache_note=next((each.stats.cache_note for each in by_prompt if each.stats.cache_note), ""),
    )
    return replace(
        first,
        num_prompt=sum(each.num_prompt for each in by_prompt),
        num_output=sum(each.num_output for each in finishes),
        num_thinking=sum(each.num_thinking for each in finishes),
        stats=merged,
        num_choices=len(finishes),
    )


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(each) for each in zip_longest(*counts, fillvalue=0))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(num_tokens: int, seconds: float) -> float:
    return round(num_tokens / seconds, 2) if seconds > 0.0 and num_tokens > 0 else 0.0
