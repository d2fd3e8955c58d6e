"""`slipstream bench step`: what a step costs by rows and depth, and how near one stream comes to the bandwidth's limit.

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
class BandwidthLimit:
    """One stream against the bandwidth."""

    depth: int
    must_move: int  # bytes
    limit_ms: float
    step_ms: float

    @property
    def times(self) -> float:
        return self.step_ms / self.limit_ms


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
    limits = _limits(times, sized.backend.step_traffic(sized.open()), settings.context, bandwidth)
    _print_table(times, limits, bandwidth, simulated(options))
    print(memory_line)
    results = {
        "settings": asdict(settings),
        "results": [asdict(each) for each in times],
        "copy_gb_s": round(bandwidth / 1e9, 2),
        "one_stream": [{**asdict(each), "times_the_limit": round(each.times, 3)} for each in limits],
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
        print(headline(options, runner.info.note))
        driver = Driver(runner, engine.max_step_tokens, settings.context)
        depths = [depth for depth in settings.depths if depth <= runner.info.max_depth]
        turns = [(num_rows, depth) for num_rows in settings.rows for depth in depths]
        return [driver.measure(num_rows, depth, settings.steps) for num_rows, depth in shown(turns, "steps")]
    finally:
        runner.close()


def _limits(times: Sequence[StepTimes], traffic: StepTraffic, context: int, bandwidth: float) -> list[BandwidthLimit]:
    alone = [each for each in times if each.rows == 1]
    moved = [step_bytes(traffic, each.depth, context) for each in alone]
    return [
        BandwidthLimit(each.depth, num_bytes, round(1e3 * num_bytes / bandwidth, 3), each.step_ms)
        for each, num_bytes in zip(alone, moved, strict=True)
    ]


def _print_table(times: Sequence[StepTimes], limits: Sequence[BandwidthLimit], bandwidth: float, label: str) -> None:
    print(f"{'rows':>6}{'depth':>7}{'tokens':>8}{'step ms':>10}{'verify ms':>11}{'draft pass ms':>15}")
    for each in times:
        draft = f"{each.draft_ms:.3f}" if each.draft_ms is not None else "-"
        print(f"{each.rows:>6}{each.depth:>7}{each.tokens:>8}{each.step_ms:>10.3f}{each.verify_ms:>11.3f}{draft:>15}")
    print(f"copies at {bandwidth / 1e9:.0f} GB/s, read and written{clause(label, '; ')}")
    for limit in limits:
        moved = f"depth {limit.depth}: one stream must move {size(limit.must_move)}, {limit.limit_ms:.3f} ms"
        print(f"{moved}; its step takes {limit.times:.2f} times that, {100 / limit.times:.0f} % of the bandwidth")


def _plot(times: Sequence[StepTimes], options: ModelOptions, to: ReportOptions) -> None:
    assert to.plot is not None
    depths = sorted({each.depth for each in times})
    series = [Series(f"depth {d}", [(each.rows, each.step_ms) for each in times if each.depth == d]) for d in depths]
    what = title(options, "time of a step")
    Chart(what, simulated(options), "rows", "milliseconds", series).write(to.plot)
