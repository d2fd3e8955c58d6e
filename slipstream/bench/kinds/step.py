"""`slipstream bench step`: what a step costs by rows and depth, and how near it comes to the bandwidth's limit.

The runner is driven directly, without scheduler and clients; the limit is the bytes of roofline.py over the speed at
which this device copies, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from slipstream.bench.harness.loaded_engine import watch_memory, with_room
from slipstream.bench.harness.plot import Chart, Series
from slipstream.bench.harness.report import check_writable, clause, headline, simulated, title, write_report
from slipstream.bench.harness.roofline import step_bytes
from slipstream.bench.harness.step_driver import WARM_STEPS, Driver, StepTimes
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import LoadingBar, shown
from slipstream.commands.text import size
from slipstream.errors import ConfigError
from slipstream.runners.backend import MemoryPlan, StepTraffic


@dataclass(frozen=True, slots=True)
class StepSettings:
    rows: Sequence[int]
    depths: Sequence[int]
    context: int = 128
    steps: int = 20

    def __post_init__(self) -> None:
        if min(self.context, self.steps) < 1:
            raise ConfigError("context and steps must be at least 1")


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step beside the time that this device takes to copy the bytes that it must move."""

    times: StepTimes
    must_move: int  # bytes
    limit_ms: float

    @property
    def over_limit(self) -> float:
        return self.times.step_ms / self.limit_ms

    def report(self) -> dict[str, float | None]:
        beside = {"must_move": self.must_move, "limit_ms": self.limit_ms, "times_the_limit": round(self.over_limit, 3)}
        return {**asdict(self.times), **beside}


def step(options: ModelOptions, settings: StepSettings, to: ReportOptions) -> int:
    check_writable(to)
    length = settings.context + (WARM_STEPS + settings.steps + 2) * (1 + max(settings.depths))
    drafting = replace(options, draft="off", max_depth=max(*settings.depths, 1))
    device = options.backend.device
    bandwidth = device.copy_bandwidth()
    sized = with_room(drafting, [length] * max(settings.rows))
    memory = watch_memory(sized)
    times = _measure(sized, settings, memory.plan)
    taken, memory_line = memory.report(), memory.line()
    device.release_memory()
    bandwidth = max(bandwidth, device.copy_bandwidth())  # after a large model copies are slower
    timed = _beside_limits(times, sized.backend.step_traffic(sized.open()), settings.context, bandwidth)
    _print_table(timed, bandwidth, simulated(options))
    print(memory_line)
    results = {
        "settings": asdict(settings),
        "results": [each.report() for each in timed],
        "copy_gb_s": round(bandwidth / 1e9, 2),
        "memory": taken,
    }
    write_report("step", options, to, results)
    if to.plot:
        _plot(times, options, to)
    return 0


def _measure(options: ModelOptions, settings: StepSettings, plan: MemoryPlan) -> list[StepTimes]:
    bar = LoadingBar(lines=True)
    model, engine = options.open(), options.engine_config
    total = model.num_bytes
    runner = options.backend.load(model, engine, plan, lambda num_bytes: bar(num_bytes, total))
    bar.close()
    try:
        print(headline(options, runner.info))
        driver = Driver(runner, engine.max_step_tokens, settings.context)
        depths = [depth for depth in settings.depths if depth <= runner.info.max_depth]
        turns = [(num_rows, depth) for num_rows in settings.rows for depth in depths]
        return [driver.measure(num_rows, depth, settings.steps) for num_rows, depth in shown(turns, "steps")]
    finally:
        runner.close()


def _beside_limits(times: Sequence[StepTimes], traffic: StepTraffic, context: int, bandwidth: float) -> list[TimedStep]:
    moved = [step_bytes(traffic, each.rows, each.depth, context) for each in times]
    return [TimedStep(each, count, round(1e3 * count / bandwidth, 3)) for each, count in zip(times, moved, strict=True)]


def _print_table(timed: Sequence[TimedStep], bandwidth: float, label: str) -> None:
    print(
        f"{'rows':>6}{'depth':>7}{'tokens':>8}{'step ms':>10}{'verify ms':>11}{'draft pass ms':>15}"
        f"{'must move':>12}{'copied in ms':>14}{'step / copy':>13}"
    )
    for each in timed:
        at = each.times
        draft = f"{at.draft_ms:.3f}" if at.draft_ms is not None else "-"
        print(
            f"{at.rows:>6}{at.depth:>7}{at.tokens:>8}{at.step_ms:>10.3f}{at.verify_ms:>11.3f}{draft:>15}"
            f"{size(each.must_move):>12}{each.limit_ms:>14.3f}{each.over_limit:>13.2f}"
        )
    print(f"copies at {bandwidth / 1e9:.0f} GB/s, read and written{clause(label, '; ')}")


def _plot(times: Sequence[StepTimes], options: ModelOptions, to: ReportOptions) -> None:
    assert to.plot is not None
    depths = sorted({each.depth for each in times})
    series = [Series(f"depth {d}", [(each.rows, each.step_ms) for each in times if each.depth == d]) for d in depths]
    what = title(options, "time of a step")
    Chart(what, simulated(options), "rows", "milliseconds", series).write(to.plot)
