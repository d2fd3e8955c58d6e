"""`slipstream bench hops`: what a proxy or router adds to each chunk of a stream, and to the first one.

The servers answer with the time at which they write (bench/hops/paced_model.py), at a pace that does not depend on the
machine. Targets take turns in one run, and the order changes: compare them with the first, which should be direct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from slipstream.bench.harness.traffic import percentile
from slipstream.bench.hops.stamp_client import StreamTimes, stream_all
from slipstream.commands.progress import shown
from slipstream.errors import ConfigError
from slipstream.host import available_threads, cpu_name

Targets = dict[str, tuple[str, ...]]  # addresses by name


@dataclass(frozen=True, slots=True)
class HopsSettings:
    targets: Targets
    streams: Sequence[int]
    num_tokens: int
    repeats: int
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class HopTurn:
    """Milliseconds: of chunks from writing to arrival, the first of each stream left out; of first chunks from sending
    the request to arrival."""

    target: str
    streams: int
    chunk_p50: float
    chunk_p99: float
    first_p50: float
    first_p99: float
    chunks_s: float
    failed: int  # streams that did not get all their tokens


def hops(settings: HopsSettings) -> int:
    turns = _measure(settings)
    medians = [_median(turns, name, count) for count in settings.streams for name in settings.targets]
    _print_table(medians)
    machine = {"cpu": cpu_name(), "cores": available_threads()}
    sizes = {"tokens": settings.num_tokens, "turns": settings.repeats}
    print(json.dumps({"bench": "hops", "results": [asdict(each) for each in medians], **sizes, "host": machine}))
    return 1 if any(each.failed for each in medians) else 0


def _measure(settings: HopsSettings) -> list[HopTurn]:
    turns: list[HopTurn] = []
    names = list(settings.targets)
    for count in settings.streams:
        for turn in shown(range(1 + settings.repeats), f"{count} streams"):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                seen = stream_all(settings.targets[name], count, settings.num_tokens, settings.api_key)
                measured = summary(name, seen, settings.num_tokens)
                turns += [measured] if turn else []  # the first warms up
    return turns


def summary(target: str, streams: Sequence[StreamTimes], num_tokens: int) -> HopTurn:
    answered = [each for each in streams if each.arrived]
    if not answered:
        raise ConfigError(f"{target}: no stream was answered (HTTP {streams[0].status}); is it a paced server?")
    delays = [delay / 1e6 for each in answered for delay in each.delays[1:]]
    firsts = [(each.arrived[0] - each.sent) / 1e6 for each in answered]
    seconds = (max(each.arrived[-1] for each in answered) - min(each.sent for each in answered)) / 1e9
    return HopTurn(
        target,
        len(streams),
        chunk_p50=round(percentile(delays, 50), 3),
        chunk_p99=round(percentile(delays, 99), 3),
        first_p50=round(percentile(firsts, 50), 3),
        first_p99=round(percentile(firsts, 99), 3),
        chunks_s=round(sum(len(each.arrived) for each in answered) / seconds, 1),
        failed=sum(len(each.arrived) != num_tokens for each in streams),
    )


def _median(turns: Sequence[HopTurn], name: str, count: int) -> HopTurn:
    mine = [turn for turn in turns if (turn.target, turn.streams) == (name, count)]

    def middle(of: Callable[[HopTurn], float]) -> float:
        return round(median(map(of, mine)), 3)

    return HopTurn(
        name,
        count,
        middle(lambda turn: turn.chunk_p50),
        middle(lambda turn: turn.chunk_p99),
        middle(lambda turn: turn.first_p50),
        middle(lambda turn: turn.first_p99),
        middle(lambda turn: turn.chunks_s),
        sum(turn.failed for turn in mine),
    )


def _print_table(rows: Sequence[HopTurn]) -> None:
    print(f"{'streams':>7}  {'target':14} {'chunk p50':>10} {'p99':>8} {'first p50':>10} {'p99':>8} {'chunks/s':>9}")
    for row in rows:
        times = f"{row.chunk_p50:7.2f} ms {row.chunk_p99:8.2f} {row.first_p50:7.1f} ms {row.first_p99:8.1f}"
        failed = f"  {row.failed} streams failed" if row.failed else ""
        print(f"{row.streams:>7}  {row.target:14} {times} {row.chunks_s:9.1f}{failed}")
