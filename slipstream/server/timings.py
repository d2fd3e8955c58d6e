"""How an answer ended and what it cost: usage, speeds, what became of its drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slipstream.engine.stats import RequestStats


@dataclass(frozen=True, slots=True)
class Finish:
    reason: Literal["stop", "length"]
    stop: str | None  # the stop string, if one ended it
    num_prompt: int
    num_output: int  # tokens up to the end; the engine may have drawn a few more behind a stop string
    stats: RequestStats

    def timings(self) -> dict[str, Any]:
        """Under the names llama.cpp's clients read. ``predicted_ms`` begins with the first token."""
        stats = self.stats
        queue = stats.queue_seconds or 0.0
        first = stats.total_seconds if stats.first_token_seconds is None else stats.first_token_seconds
        reading, writing = first - queue, stats.total_seconds - first
        return {
            "queue_ms": _ms(queue),
            "prompt_n": self.num_prompt,
            "prompt_ms": _ms(reading),
            "prompt_per_second": _rate(self.num_prompt, reading),
            "predicted_n": self.num_output,
            "predicted_ms": _ms(writing),
            "predicted_per_second": _rate(stats.output_tokens - 1, writing),
            "draft_n": stats.draft_tokens,
            "draft_n_accepted": stats.accepted_tokens,
            "drafted_per_position": list(stats.drafted_per_position),
            "accepted_per_position": list(stats.accepted_per_position),
            "speculation": stats.why_no_draft or stats.depth_reason,
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(num_tokens: int, seconds: float) -> float:
    return round(num_tokens / seconds, 2) if seconds > 0.0 and num_tokens > 0 else 0.0
