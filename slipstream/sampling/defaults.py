"""What a request's sampling is where it leaves fields out: the model's own recommendation, or neutral values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.sampling.params import SamplingParams

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """None: the default of SamplingParams, which leaves the model's distribution as it is. Raises ParamsError."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = "neutral"  # where they come from, for people

    def __post_init__(self) -> None:
        SamplingParams(**self.merged({}))

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of SamplingParams. ``given``: those of a request, None where it leaves one out."""
        own = {name: getattr(self, name) for name in NAMES}
        return _present(own) | _present(given)

    def report(self) -> dict[str, Any]:
        """All of them as numbers, and where they come from."""
        params = SamplingParams(**self.merged({}))
        return {**{name: getattr(params, name) for name in NAMES}, "source": self.source}

    def __str__(self) -> str:
        shown = self.merged({}) or {"temperature": SamplingParams().temperature}
        return ", ".join(f"{name} {value:g}" for name, value in shown.items()) + f" ({self.source})"


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


NEUTRAL = SamplingDefaults()
