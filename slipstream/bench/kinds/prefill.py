"""`slipstream bench prefill`: how fast prompts are read, what of it is the head's, and what running streams feel of it.

The head's share needs two engines: one whose head reads every prompt token, one without a head. The streams' time
between steps is compared with that of the same streams before the long prompt came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from slipstream.bench.harness.loaded_engine import for_modes, loaded, with_room
from slipstream.bench.harness.report import check_writable, clause, headline, simulated, write_report
from slipstream.bench.harness.traffic import StreamLog, StreamRequest, abort, percentiles_ms, run_together, submit
from slipstream.bench.harness.workload import random_prompt
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import shown
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.sampling import DraftSetting, SamplingParams

STREAM_PROMPT = 128
PERCENTS = (50, 99)


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    lengths: Sequence[int]
    modes: Sequence[DraftSetting]  # of the running streams
    streams: int = 8
    quiet_steps: int = 100  # each stream's, before the long prompt comes
    repeats: int = 3  # of each prompt; the fastest counts

    def __post_init__(self) -> None:
        if min(self.streams, self.quiet_steps, self.repeats, *self.lengths) < 1:
            raise ConfigError("lengths, streams, quiet-steps and repeats must be at least 1")


@dataclass(frozen=True, slots=True)
class PromptRead:
    """A prompt alone on the engine."""

    length: int
    with_head_s: float | None  # None: the model has no head
    without_head_s: float

    @property
    def head_cost(self) -> float | None:
        """What the head adds to the time without it."""
        return self.with_head_s / self.without_head_s - 1.0 if self.with_head_s else None

    def report(self) -> dict[str, object]:
        rate = round(self.length / self.with_head_s, 1) if self.with_head_s else None
        plain = round(self.length / self.without_head_s, 1)
        cost = None if self.head_cost is None else round(self.head_cost, 4)
        return {**asdict(self), "tok_s": rate, "tok_s_without_head": plain, "head_cost": cost}


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Running streams while the longest prompt is read."""

    mode: str
    length: int
    quiet_ms: dict[str, float]
    disturbed_ms: dict[str, float]
    first_token_s: float  # of the long prompt
    num_ended_early: int  # streams that were at their end before the prompt was read

    @property
    def p99_ratio(self) -> float | None:
        return self.disturbed_ms["p99"] / self.quiet_ms["p99"] if self.disturbed_ms and self.quiet_ms else None


def prefill(options: ModelOptions, settings: PrefillSettings, to: ReportOptions) -> int:
    check_writable(to)
    longest = max(settings.lengths)
    running = STREAM_PROMPT + _stream_tokens(settings, options)
    sized = with_room(for_modes(options, settings.modes), [longest + 1, *[running] * settings.streams])
    with_head, disturbed, head = _with_head(sized, settings)
    without = _read_all(replace(sized, max_depth=0, draft="off"), settings)
    reads = [PromptRead(n, with_head[n] if head else None, without[n]) for n in settings.lengths]
    _print(reads, disturbed, simulated(options))
    results = {
        "settings": asdict(settings),
        "step_tokens": sized.engine_config.max_step_tokens,
        "results": [read.report() for read in reads],
        "disturbed": [{**asdict(each), "p99_ratio": _rounded(each.p99_ratio)} for each in disturbed],
    }
    write_report("prefill", options, to, results)
    return 0


def _stream_tokens(settings: PrefillSettings, options: ModelOptions) -> int:
    """Enough for the quiet steps and for as many as reading the prompt can take, drafts accepted."""
    num_steps = 2 * settings.quiet_steps + 2 * max(settings.lengths) // options.engine_config.min_chunk
    return min(num_steps * (1 + options.engine_config.max_depth), 1 << 14)


def _with_head(options: ModelOptions, settings: PrefillSettings) -> tuple[dict[int, float], list[Disturbed], bool]:
    with loaded(options) as (llm, _):
        print(headline(options, llm.engine.info), flush=True)
        seconds = _read_prompts(llm, settings, "with head")
        disturbed = [_disturb(llm, settings, mode, options) for mode in shown(settings.modes, "disturbed")]
        return seconds, disturbed, llm.engine.info.max_depth > 0


def _read_all(options: ModelOptions, settings: PrefillSettings) -> dict[int, float]:
    with loaded(options) as (llm, _):
        return _read_prompts(llm, settings, "without head")


def _read_prompts(llm: LLM, settings: PrefillSettings, what: str) -> dict[int, float]:
    """From submission to the first token, which is the only one; the fastest run after one that is not looked at."""
    runs: dict[int, list[float]] = {length: [] for length in settings.lengths}
    turns = [length for length in settings.lengths for _ in range(1 + settings.repeats)]
    for length in shown(turns, what):
        runs[length].append(run_together(llm.engine, [_prompt(llm, length)])[0].first_seconds)
    return {length: round(min(each[1:]), 5) for length, each in runs.items()}


def _prompt(llm: LLM, length: int) -> StreamRequest:
    prompt = random_prompt(length, llm.engine.info.vocab_size, length)
    return StreamRequest(prompt, SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True, draft="off"))


def _disturb(llm: LLM, settings: PrefillSettings, mode: DraftSetting, options: ModelOptions) -> Disturbed:
    length = max(settings.lengths)
    params = SamplingParams(
        temperature=0.0, seed=0, max_tokens=_stream_tokens(settings, options), ignore_eos=True, draft=mode
    )
    vocab_size = llm.engine.info.vocab_size
    requests = [StreamRequest(random_prompt(STREAM_PROMPT, vocab_size, i), params) for i in range(settings.streams)]
    logs: list[StreamLog] = []
    try:
        logs += (submit(llm.engine, request) for request in requests)
        for log in logs:
            log.wait_begun()
        began = max(log.first for log in logs)
        _wait_steps(logs, settings.quiet_steps)
        guest = submit(llm.engine, _prompt(llm, length))
        guest.wait()
    finally:
        abort(llm.engine, logs)
    for log in logs:
        log.wait()
    return _compare(str(mode), length, logs, guest, began)


def _wait_steps(logs: Sequence[StreamLog], num_steps: int) -> None:
    """Until each stream had that many, or has ended."""
    wanted = [len(log.times) + num_steps for log in logs]
    for log, steps in zip(logs, wanted, strict=True):
        while len(log.times) < steps and not log.wait(0.005):
            pass


def _compare(mode: str, length: int, logs: Sequence[StreamLog], guest: StreamLog, began: float) -> Disturbed:
    quiet = [gap for log in logs for gap in log.gaps(began, guest.submitted)]
    during = [gap for log in logs for gap in log.gaps(guest.submitted, guest.first)]
    return Disturbed(
        mode,
        length,
        percentiles_ms(quiet, PERCENTS),
        percentiles_ms(during, PERCENTS),
        round(guest.first_seconds, 4),
        sum(log.finished and log.end < guest.first for log in logs),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _print(reads: Sequence[PromptRead], disturbed: Sequence[Disturbed], label: str) -> None:
    print(f"\n{'prompt':>8}{'tok/s':>10}{'no head':>10}{'the head adds':>15}")
    for read in reads:
        speeds = read.report()
        cost = f"{100 * read.head_cost:.1f} %" if read.head_cost is not None else "-"
        print(f"{read.length:>8}{speeds['tok_s'] or '-':>10}{speeds['tok_s_without_head']:>10}{cost:>15}")
    print(f"\nrunning streams, ms between steps, p50 / p99{clause(label)}")
    print(f"{'mode':<10}{'alone':>18}{'beside the prompt':>20}{'p99 ratio':>11}{'its first token':>17}")
    for each in disturbed:
        cells = [" / ".join(f"{v:.1f}" for v in ms.values()) or "-" for ms in (each.quiet_ms, each.disturbed_ms)]
        ratio = f"{each.p99_ratio:.2f}" if each.p99_ratio else "-"
        early = f"  {each.num_ended_early} streams ended before it" if each.num_ended_early else ""
        print(f"{each.mode:<10}{cells[0]:>18}{cells[1]:>20}{ratio:>11}{each.first_token_s:>15.2f} s{early}", flush=True)
