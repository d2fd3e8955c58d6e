"""How numbers are shown to people: bytes, rates, what drafting did and why."""

from __future__ import annotations

from typing import TextIO

from slipstream.engine.stats import RequestStats
from slipstream.errors import printable


def show(line: str) -> None:
    """Prints a line that may quote a model file."""
    print(printable(line), flush=True)


def dim(text: str, stream: TextIO) -> str:
    """Grey on a terminal, as it is elsewhere."""
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() else text


def size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def decode_rate(stats: RequestStats) -> float:
    """Tokens a second after the first one."""
    if stats.first_token_seconds is None or stats.output_tokens < 2:
        return 0.0
    return (stats.output_tokens - 1) / max(1e-9, stats.total_seconds - stats.first_token_seconds)


def summary(stats: RequestStats) -> str:
    """One short line about an answer."""
    rate = decode_rate(stats)
    parts = [f"{stats.output_tokens} tokens", *([f"{rate:.1f} tok/s"] if rate else []), stats.speculation]
    if stats.draft_tokens:
        share = percent(stats.accepted_tokens, stats.draft_tokens)
        parts.append(f"{stats.accepted_tokens} of {stats.draft_tokens} drafts accepted ({share})")
    return ", ".join(parts)
