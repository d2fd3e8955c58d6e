"""`slipstream bench load`: Poisson arrivals at given rates; time to the first token and between tokens, by draft mode.

The arrivals, prompts and lengths are the same for every mode. Bounded in requests and in time: what has not arrived by
then is not sent, what has not ended some time later is aborted and counted as unfinished.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from slipstream.bench.harness.loaded_engine import for_modes, loaded, with_room
from slipstream.bench.harness.plot import Chart, Series
from slipstream.bench.harness.prompt_rounds import accepted_by_position
from slipstream.bench.harness.report import check_writable, clause, headline, simulated, title, write_report
from slipstream.bench.harness.traffic import StreamLog, StreamRequest, abort, percentiles_ms, run_together, submit
from slipstream.bench.harness.workload import random_prompt
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import shown
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.sampling import DraftSetting, SamplingParams

Span = tuple[int, int]
WARM_STREAMS, WARM_TOKENS = 4, 16


@dataclass(frozen=True, slots=True)
class LoadSettings:
    rates: Sequence[float]  # requests a second
    modes: Sequence[DraftSetting]
    requests: int = 64
    seconds: float = 60.0  # no arrivals later; then as long again for running requests
    prompt: Span = (64, 256)
    new: Span = (64, 256)
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or self.requests < 1 or self.seconds <= 0:
            raise ConfigError("rates, requests and seconds must be more than 0")


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds from the start
    prompt: list[int]
    num_new: int
    seed: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    rate: float
    mode: str
    sent: int
    finished: int
    wall_s: float
    tok_s: float
    first_token_ms: dict[str, float]
    between_steps_ms: dict[str, float]  # a step that brings several tokens counts once
    per_token_ms: dict[str, float]  # of each stream: the time after its first token over the tokens after it
    accepted_per_position: tuple[float, ...]
    preemptions: int


def load(options: ModelOptions, settings: LoadSettings, to: ReportOptions) -> int:
    check_writable(to)
    length = settings.prompt[1] + settings.new[1]
    sized = with_room(for_modes(options, settings.modes), [length] * options.max_streams)
    rows: list[LoadResult] = []
    with loaded(sized) as (llm, memory):
        print(headline(options, llm.engine.info))
        print(_headline(settings, simulated(options)))
        runs = [(rate, mode) for rate in settings.rates for mode in settings.modes]
        for rate, mode in runs:
            arrivals = schedule(settings, rate, llm.engine.info.vocab_size)
            _warm_up(llm.engine, arrivals, mode, settings.temperature)
            rows.append(_measure(llm.engine, settings, arrivals, rate, mode))
            print(_line(rows[-1]), flush=True)
        taken = memory.report()
    results = {"settings": asdict(settings), "results": [asdict(row) for row in rows], "memory": taken}
    write_report("load", options, to, results)
    if to.plot:
        _plot(rows, options, to)
    return 0


def schedule(settings: LoadSettings, rate: float, vocab_size: int) -> list[Arrival]:
    """Exponential gaps; the same for the same seed and rate."""
    chance = random.Random(f"{settings.seed} {rate}")
    arrivals, at = [], 0.0
    for number in range(settings.requests):
        at += chance.expovariate(rate)
        if at > settings.seconds:
            break
        prompt = random_prompt(chance.randint(*settings.prompt), vocab_size, chance.getrandbits(32))
        arrivals.append(Arrival(at, prompt, chance.randint(*settings.new), number))
    return arrivals


def _ask(arrival: Arrival, mode: DraftSetting, temperature: float) -> StreamRequest:
    params = SamplingParams(temperature, seed=arrival.seed, max_tokens=arrival.num_new, ignore_eos=True, draft=mode)
    return StreamRequest(arrival.prompt, params)


def _warm_up(engine: Engine, arrivals: Sequence[Arrival], mode: DraftSetting, temperature: float) -> None:
    params = SamplingParams(temperature, seed=0, max_tokens=WARM_TOKENS, ignore_eos=True, draft=mode)
    run_together(engine, [StreamRequest(arrival.prompt, params) for arrival in arrivals[:WARM_STREAMS]])


def _measure(
    engine: Engine, settings: LoadSettings, arrivals: Sequence[Arrival], rate: float, mode: DraftSetting
) -> LoadResult:
    logs: list[StreamLog] = []
    began = time.perf_counter()
    turns = shown(arrivals, f"{rate:g} requests a second, {mode}: sent")
    try:
        for arrival in turns:
            time.sleep(max(0.0, began + arrival.at - time.perf_counter()))
            logs.append(submit(engine, _ask(arrival, mode, settings.temperature)))
        until = time.perf_counter() + settings.seconds
        for log in logs:
            log.wait(max(0.0, until - time.perf_counter()))
    finally:
        abort(engine, logs)
    for log in logs:
        log.wait()
    return _summarise(rate, str(mode), began, logs)


def _summarise(rate: float, mode: str, began: float, logs: Sequence[StreamLog]) -> LoadResult:
    begun = [log for log in logs if log.times]
    seconds = max((log.end for log in begun), default=began) - began
    slow = [(log.end - log.first) / (len(log.tokens) - 1) for log in begun if len(log.tokens) > 1]
    return LoadResult(
        rate,
        mode,
        len(logs),
        sum(log.finished for log in logs),
        round(seconds, 3),
        round(sum(len(log.tokens) for log in begun) / seconds, 2) if begun else 0.0,
        percentiles_ms([log.first_seconds for log in begun]),
        percentiles_ms([gap for log in begun for gap in log.gaps()]),
        percentiles_ms(slow),
        accepted_by_position([log.stats for log in logs]),
        sum(log.stats.preemptions for log in logs),
    )


def _headline(settings: LoadSettings, label: str) -> str:
    spans = ["-".join(map(str, dict.fromkeys(span))) for span in (settings.prompt, settings.new)]
    columns = f"{'rate':>6}  {'mode':<9}{'done':>9}{'tok/s':>9}"
    columns += "".join(f"{name:>24}" for name in ("first token ms", "between steps ms", "per token ms"))
    return (
        f"\nPoisson arrivals, prompts of {spans[0]} tokens, {spans[1]} new; p50 / p90 / p99{clause(label)}\n{columns}"
    )


def _line(row: LoadResult) -> str:
    done = f"{row.finished}/{row.sent}"
    cells = "".join(f"{_shown(each):>24}" for each in (row.first_token_ms, row.between_steps_ms, row.per_token_ms))
    return f"{row.rate:>6g}  {row.mode:<9}{done:>9}{row.tok_s:>9.1f}{cells}"


def _shown(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in percentiles.values()) or "-"


def _plot(rows: Sequence[LoadResult], options: ModelOptions, to: ReportOptions) -> None:
    assert to.plot is not None
    series = [
        Series(mode, [(row.rate, row.per_token_ms["p50"]) for row in rows if row.mode == mode and row.per_token_ms])
        for mode in dict.fromkeys(row.mode for row in rows)
    ]
    what = title(options, "time per token under load")
    Chart(what, simulated(options), "requests a second", "milliseconds per token, median", series).write(to.plot)
