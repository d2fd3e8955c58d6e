"""Mixed traffic: what streams without drafting lose when half of the batch drafts.

Speeds are per stream, over the time in which every stream of the batch was decoding: a drafting stream that ends early
must not make room for the others within the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from slipstream.bench.harness.report import clause
from slipstream.bench.harness.traffic import StreamLog, StreamRequest, run_together
from slipstream.bench.harness.workload import prompts, stream_requests
from slipstream.commands.progress import shown
from slipstream.llm import LLM
from slipstream.sampling import DraftSetting


@dataclass(frozen=True, slots=True)
class Mixed:
    streams: int
    mode: str  # of the other half
    plain_alone_tok_s: float | None  # of one plain stream in an all-plain batch
    plain_mixed_tok_s: float | None  # the same where the other half drafts
    drafting_tok_s: float | None  # of one stream of the drafting half

    @property
    def kept(self) -> float | None:
        if not self.plain_alone_tok_s or not self.plain_mixed_tok_s:
            return None
        return self.plain_mixed_tok_s / self.plain_alone_tok_s


def measure(
    llm: LLM, counts: Sequence[int], modes: Sequence[DraftSetting], num_prompt: int | None, num_new: int
) -> list[Mixed]:
    drafting = [mode for mode in modes if mode not in ("off", 0)]
    turns = [(count, mode) for count in counts if count > 1 for mode in drafting]
    return [_mixed(llm, count, mode, num_prompt, num_new) for count, mode in shown(turns, "mixed")]


def _mixed(llm: LLM, count: int, mode: DraftSetting, num_prompt: int | None, num_new: int) -> Mixed:
    given = prompts(llm, count, num_prompt)
    half = count // 2
    alone = _run(llm, stream_requests(given, num_new, 0.0, "off"))
    plain = stream_requests(given, num_new, 0.0, "off")[:half]
    mixed = _run(llm, plain + stream_requests(given, num_new, 0.0, mode)[half:])
    return Mixed(
        count,
        str(mode),
        per_stream(alone, alone[:half]),
        per_stream(mixed, mixed[:half]),
        per_stream(mixed, mixed[half:]),
    )


def _run(llm: LLM, requests: Sequence[StreamRequest]) -> list[StreamLog]:
    """Twice: the first time is a warm-up."""
    run_together(llm.engine, requests)
    return run_together(llm.engine, requests)


def per_stream(batch: Sequence[StreamLog], part: Sequence[StreamLog]) -> float | None:
    """Tokens a second of one stream of ``part`` while all of ``batch`` were decoding; None if they never were."""
    began, ended = max(log.first for log in batch), min(log.end for log in batch)
    if ended <= began:
        return None
    tokens = sum(log.tokens_within(began, ended) for log in part)
    return round(tokens / (ended - began) / len(part), 2)


def report(row: Mixed) -> dict[str, object]:
    return {**asdict(row), "kept": round(row.kept, 3) if row.kept else None}


def print_table(rows: Sequence[Mixed], label: str) -> None:
    if not rows:
        return
    print(f"\nhalf of the streams plain, half drafting: tokens a second of one stream{clause(label)}")
    print(f"{'streams':>7}  {'mode':<9}{'all plain':>10}{'plain half':>11}{'kept':>7}{'drafting half':>14}")
    for row in rows:
        numbers = (row.plain_alone_tok_s, row.plain_mixed_tok_s, row.kept, row.drafting_tok_s)
        cells = "".join(_cell(value, width) for value, width in zip(numbers, (10, 11, 7, 14), strict=True))
        print(f"{row.streams:>7}  {row.mode:<9}{cells}", flush=True)


def _cell(value: float | None, width: int) -> str:
    return f"{value:>{width}.2f}" if value else f"{'-':>{width}}"
