"""The metrics of several replicas in one exposition: each with its name as a label, or added up.

Pure text to text. Sums count only the replicas that are there: where one leaves, a sum of counters falls, so rates are
better taken from the labelled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LABEL = "replica"
# Gauges whose sum says nothing.
MEANS = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "slipstream_draft_depth")
INFOS = ("_info",)

Labels = tuple[tuple[str, str], ...]


class Line(NamedTuple):
    """A sample's name and labels: what it is added up under."""

    name: str
    labels: Labels


def by_replica(texts: Mapping[str, str]) -> bytes:
    """``texts``: expositions by the name of their replica."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            own = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            own.samples += [_labelled(sample, replica) for sample in family.samples]
    return _text(families.values())


def summed(texts: Mapping[str, str]) -> bytes:
    families: dict[str, Metric] = {}
    values: dict[str, dict[Line, list[float]]] = {}
    for text in texts.values():
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                line = Line(sample.name, tuple(sample.labels.items()))
                values.setdefault(family.name, {}).setdefault(line, []).append(sample.value)
    for name, lines in values.items():
        add = _rule(name)
        families[name].samples = [Sample(line.name, dict(line.labels), add(found)) for line, found in lines.items()]
    return _text(families.values())


def _rule(name: str) -> Callable[[Sequence[float]], float]:
    if name in MEANS:
        return lambda found: sum(found) / len(found)
    return max if name.endswith(INFOS) else sum


def _labelled(sample: Sample, replica: str) -> Sample:
    return Sample(sample.name, {**sample.labels, LABEL: replica}, sample.value)


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Ready(families))
    return generate_latest(registry)


class _Ready:
    """A collector of families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        return ()
