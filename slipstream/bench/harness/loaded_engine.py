"""A loaded model for a benchmark, with its memory plan beside what it really took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from slipstream.commands.options import ModelOptions, load_llm
from slipstream.commands.text import size
from slipstream.llm import LLM
from slipstream.runners.backend import MemoryPlan, PeakMemory
from slipstream.sampling import DraftSetting

SLACK = 32  # tokens after a stream's last one: drafts, and steps that are in flight


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    plan: MemoryPlan
    peak: PeakMemory

    def report(self) -> dict[str, int]:
        return {"planned": self.plan.total, **self.peak.read()}

    def line(self) -> str:
        parts = [f"{name} {size(value)}" for name, value in self.report().items()]
        return f"memory: {', '.join(parts)}"


def watch_memory(options: ModelOptions) -> MemoryWatch:
    """Made before the model is loaded."""
    backend = options.backend
    plan = backend.plan_memory(options.open(), options.engine_config)
    return MemoryWatch(plan, backend.device.watch_memory())


@contextmanager
def loaded(options: ModelOptions) -> Iterator[tuple[LLM, MemoryWatch]]:
    memory = watch_memory(options)
    try:
        with load_llm(options, lines=True) as llm:
            yield llm, memory
    finally:
        options.backend.device.release_memory()


def for_modes(options: ModelOptions, modes: Sequence[DraftSetting]) -> ModelOptions:
    """One engine for all modes, which requests choose. Its own is adaptive where costs must be known, as they are
    measured at the start only then."""
    return replace(options, draft="adaptive" if {"adaptive", "solo"} & set(modes) else "off")


def with_room(options: ModelOptions, lengths: Sequence[int]) -> ModelOptions:
    """For streams of these lengths at once, unless the operator chose otherwise."""
    context = options.max_context or max(lengths) + SLACK
    sized = replace(options, max_streams=len(lengths), max_context=context)
    if options.kv_memory is not None:
        return sized
    plan = watch_memory(sized).plan
    if not plan.shared_pool:  # each stream has the context's room
        return sized
    num_blocks = sum(-(-(length + SLACK) // plan.block_size) for length in lengths) + len(lengths)
    return replace(sized, kv_memory=plan.states + num_blocks * plan.block_size * plan.kv_per_token)
