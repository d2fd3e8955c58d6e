"""What a client may ask for in every event of a stream: token ids, usage and speed so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.server.protocols.openai.fields import OpenAiSamplingFields
from slipstream.server.service.choice import ChoiceDelta, Progress


class LiveFields:
    """True if the client asked for any."""

    def __init__(self, request: OpenAiSamplingFields) -> None:
        self.token_ids = bool(request.return_token_ids)
        self._usage, self._timings = request.wants_live_usage, bool(request.timings_per_token)
        self._num_output: dict[int, int] = {}  # of each choice

    def __bool__(self) -> bool:
        return self.token_ids or self._usage or self._timings

    def of_choice(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.token_ids else {}

    def of_chunk(self, delta: ChoiceDelta) -> dict[str, Any]:
        progress = delta.progress
        if progress is None:
            return {}
        self._num_output[delta.index] = progress.num_output
        usage = {"usage": self._usage_so_far(progress)} if self._usage else {}
        return usage | ({"timings": _timings(progress)} if self._timings else {})

    def _usage_so_far(self, progress: Progress) -> dict[str, Any]:
        num_output = sum(self._num_output.values())
        return {
            "prompt_tokens": progress.num_prompt,
            "completion_tokens": num_output,
            "total_tokens": progress.num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": progress.num_cached},
        }


def _timings(progress: Progress) -> dict[str, float]:
    """With the field names of llama.cpp's server. ``prompt_ms`` includes the queue here."""
    seconds, num_output = progress.output_seconds, progress.num_output
    return {
        "prompt_n": progress.num_prompt - progress.num_cached,
        "cached_tokens": progress.num_cached,
        "prompt_ms": round(progress.prompt_seconds * 1e3, 3),
        "predicted_n": num_output,
        "predicted_ms": round(seconds * 1e3, 3),
        "predicted_per_second": round((num_output - 1) / seconds, 2) if seconds > 0.0 and num_output > 1 else 0.0,
    }
