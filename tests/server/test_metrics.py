"""Our histogram exports the same lines as the library's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs
from prometheus_client.exposition import generate_latest

from slipstream.server.service.metrics import Histogram

BOUNDS = (0.1, 0.5, 2.5)
SEEN = [(0.05, 1), (0.1, 3), (0.3, 2), (9.0, 4)]  # seconds, how often


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_it_exports_what_the_librarys_exports() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own, other = Histogram("x_seconds", "Some.", BOUNDS), Theirs("x_seconds", "Some.", buckets=BOUNDS, registry=theirs)
    ours.register(own)
    for seconds, times in SEEN:
        own.observe(seconds, times)
        for _ in range(times):
            other.observe(seconds)
    assert lines(ours) == lines(theirs)
