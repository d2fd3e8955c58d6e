"""`slipstream bench streams`: output tokens a second over all streams, by number of streams and by draft mode.

All requests are submitted at once and run to their full length. The rate is all output tokens over the seconds from
submission to the last token; beside it the rate from the moment on at which every stream had its first token. One
engine serves all modes, a request chooses; each setting runs once unmeasured before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from slipstream.bench.harness import mixed_traffic
from slipstream.bench.harness.loaded_engine import for_modes, loaded, with_room
from slipstream.bench.harness.plot import Chart, Series
from slipstream.bench.harness.prompt_rounds import accepted_by_position
from slipstream.bench.harness.report import check_writable, clause, headline, simulated, title, write_report
from slipstream.bench.harness.traffic import StreamRequest, decode_rate, percentile, run_together
from slipstream.bench.harness.workload import RANDOM_PROMPT, prompts, stream_requests
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import shown
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.sampling import DraftSetting

LONGEST_TEXT = 512  # tokens of the longest of the nine prompts, with room to spare


@dataclass(frozen=True, slots=True)
class StreamsSettings:
    streams: Sequence[int]
    modes: Sequence[DraftSetting]
    temperatures: Sequence[float] = (0.0,)
    prompt: int | None = None  # tokens; None: real text where the model has any
    new: int = 256
    warm: int = 48  # new tokens of the unmeasured run
    repeats: int = 1  # the fastest counts
    mix: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.new, self.warm, self.repeats, self.prompt or 1) < 1:
            raise ConfigError("prompt, new, warm and repeats must be at least 1")


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """One setting's fastest run."""

    temperature: float
    streams: int
    mode: str
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    tok_s: float
    decode_tok_s: float | None
    first_token_p50_s: float
    tokens_per_step: float
    accepted_per_position: tuple[float, ...]
    preemptions: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def fixed(self) -> bool:
        return self.mode == "off" or self.mode.isdigit()


def streams(options: ModelOptions, settings: StreamsSettings, to: ReportOptions) -> int:
    check_writable(to)
    length = longest(options, settings.prompt) + settings.new
    sized = with_room(for_modes(options, settings.modes), [length] * max(settings.streams))
    with loaded(sized) as (llm, memory):
        print(headline(options, llm.engine.info))
        rows = [row for temperature in settings.temperatures for row in _at(llm, options, settings, temperature)]
        mixed = (
            mixed_traffic.measure(llm, settings.streams, settings.modes, settings.prompt, settings.new)
            if settings.mix
            else []
        )
        mixed_traffic.print_table(mixed, simulated(options))
        print(memory.line())
        taken = memory.report()
    results = {
        "settings": asdict(settings),
        "results": report(rows, options),
        "mix": [mixed_traffic.report(each) for each in mixed],
    }
    write_report("streams", options, to, {**results, "memory": taken})
    if to.plot:
        plot(rows, options, to)
    return 0


def longest(options: ModelOptions, prompt: int | None) -> int:
    """Tokens of the longest prompt."""
    return prompt or (RANDOM_PROMPT if options.shape else LONGEST_TEXT)


def _at(llm: LLM, options: ModelOptions, settings: StreamsSettings, temperature: float) -> list[StreamsResult]:
    rows: list[StreamsResult] = []
    print(_headline(temperature, settings, options))
    for count in settings.streams:
        given = prompts(llm, count, settings.prompt, settings.seed)
        turns = [(mode, again) for again in range(settings.repeats) for mode in settings.modes]
        runs: dict[DraftSetting, list[StreamsResult]] = {mode: [] for mode in settings.modes}
        for mode, again in shown(turns, f"{count} streams"):
            if not again:
                run_together(
                    llm.engine,
                    stream_requests(given, min(settings.warm, settings.new), temperature, mode, settings.seed),
                )
            requests = stream_requests(given, settings.new, temperature, mode, settings.seed)
            runs[mode].append(measure(llm, requests, temperature, str(mode)))
        best = [max(each, key=lambda run: run.tok_s) for each in runs.values()]
        rows += best
        for row in best:
            print(_line(row, best, options), flush=True)
    return rows


def measure(llm: LLM, requests: Sequence[StreamRequest], temperature: float, mode: str) -> StreamsResult:
    logs = run_together(llm.engine, requests)
    stats = [log.stats for log in logs]
    began, ended = min(log.submitted for log in logs), max(log.end for log in logs)
    output = sum(each.output_tokens for each in stats)
    return StreamsResult(
        temperature,
        len(logs),
        mode,
        sum(log.num_prompt for log in logs),
        output,
        round(ended - began, 4),
        round(output / (ended - began), 2),
        decode_rate(logs),
        round(percentile([log.first_seconds for log in logs], 50), 4),
        round(output / sum(each.steps for each in stats), 3),
        accepted_by_position(stats),
        sum(each.preemptions for each in stats),
        tuple(tuple(log.tokens) for log in logs),
    )


# Ratios.


def against(row: StreamsResult, rows: Sequence[StreamsResult]) -> dict[str, float | None]:
    """To `off`, to the best of `off` and the fixed depths, and to `solo`, at the same load."""
    peers = [each for each in rows if (each.streams, each.temperature) == (row.streams, row.temperature)]
    return {
        "against_off": _ratio(row, [each for each in peers if each.mode == "off"]),
        "against_best_fixed": _ratio(row, [each for each in peers if each.fixed]),
        "against_solo": _ratio(row, [each for each in peers if each.mode == "solo"]),
    }


def _ratio(row: StreamsResult, others: Sequence[StreamsResult]) -> float | None:
    return round(row.tok_s / max(each.tok_s for each in others), 3) if others else None


def same_as_off(row: StreamsResult, rows: Sequence[StreamsResult]) -> int | None:
    """How many streams have the tokens that `off` gave them; None where `off` did not run."""
    key = (row.streams, row.temperature, "off")
    plain = next((each for each in rows if (each.streams, each.temperature, each.mode) == key), None)
    return None if plain is None else sum(a == b for a, b in zip(row.tokens, plain.tokens, strict=True))


def report(rows: Sequence[StreamsResult], options: ModelOptions) -> list[dict[str, object]]:
    reported: list[dict[str, object]] = []
    for row in rows:
        each = {key: value for key, value in asdict(row).items() if key != "tokens"}
        same = None if options.simulate_acceptance else same_as_off(row, rows)
        reported.append({**each, **against(row, rows), "streams_same_as_off": same})
    return reported


# For people.


def _headline(temperature: float, settings: StreamsSettings, options: ModelOptions) -> str:
    what = f"{settings.prompt} tokens" if settings.prompt else (f"{RANDOM_PROMPT} tokens" if options.shape else "text")
    label = expected(options)
    columns = (
        f"{'streams':>7}  {'mode':<9}{'tok/s':>9}{'decode':>9}{'/ off':>7}{'/ best':>7}{'/ solo':>7}{'per step':>9}"
    )
    return (
        f"\ntemperature {temperature:g}, prompts of {what}, {settings.new} new tokens{clause(label)}\n"
        f"{columns}  accepted by position"
    )


def expected(options: ModelOptions) -> str:
    """The label of a simulation, and what it lets a step yield in the long run: a short run differs by chance."""
    rates = options.simulate_acceptance
    sums = " ".join(f"{1 + sum(rates[:depth]):.2f}" for depth in range(1, len(rates) + 1))
    return f"{simulated(options)} (in the long run {sums} tokens a step at depths 1, 2, ...)" if rates else ""


def _line(row: StreamsResult, rows: Sequence[StreamsResult], options: ModelOptions) -> str:
    ratios = "".join(f"{ratio:>7.2f}" if ratio else f"{'-':>7}" for ratio in against(row, rows).values())
    decode = f"{row.decode_tok_s:>9.1f}" if row.decode_tok_s else f"{'-':>9}"
    positions = " ".join(f"{100 * rate:.0f} %" for rate in row.accepted_per_position)
    line = f"{row.streams:>7}  {row.mode:<9}{row.tok_s:>9.1f}{decode}{ratios}{row.tokens_per_step:>9.2f}  {positions}"
    same = row.streams if options.simulate_acceptance else same_as_off(row, rows)
    notes = [f"{row.preemptions} preemptions"] if row.preemptions else []
    notes += [f"tokens as with off: {same} of {row.streams} streams"] if same not in (None, row.streams) else []
    return "  ".join([line.rstrip(), *notes])


def plot(rows: Sequence[StreamsResult], options: ModelOptions, to: ReportOptions) -> None:
    assert to.plot is not None
    temperatures = sorted({row.temperature for row in rows})
    series = [
        Series(
            (f"depth {mode}" if mode.isdigit() else mode) + (f", t {at:g}" if len(temperatures) > 1 else ""),
            [(row.streams, row.tok_s) for row in rows if (row.mode, row.temperature) == (mode, at)],
            bold=mode == "adaptive",
            dashed=mode == "solo",
        )
        for at in temperatures
        for mode in dict.fromkeys(row.mode for row in rows)
    ]
    what = title(options, "output tokens a second")
    subtitle = f"temperature {'/'.join(f'{each:g}' for each in temperatures)}{clause(simulated(options))}"
    Chart(what, subtitle, "streams at once", "output tokens a second, all streams", series).write(to.plot)
