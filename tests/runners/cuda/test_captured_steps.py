"""Which steps are captured: where memory is short, no large one that reads prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny
import torch
from harness import open_resident

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import RowJoin, RowStep, StepPlan
from slipstream.load.random.model import open_random
from slipstream.runners.backend import MemoryPlan
from slipstream.runners.cuda.graphs import Graphs
from slipstream.runners.cuda.layout import TOKEN_BUCKETS
from slipstream.runners.cuda.platform import PROMPT_STEPS
from slipstream.runners.torch.backend import TorchBackend
from slipstream.sampling import SamplingParams

ROOMY, TIGHT = PROMPT_STEPS


@dataclass
class Spy:
    """In place of captured steps."""

    enabled: bool = False
    captures: list[bool] = field(default_factory=list)

    def run(self, key: Hashable, kind: Hashable, step: Callable[[], None], captures: bool = True) -> None:
        self.captures.append(captures)
        step()


def test_large_prompts_run_as_they_are(tmp_path: Path) -> None:
    runner = open_resident(tiny.save(tiny.build("llama-gqa-tied"), tmp_path, head=True))
    spy = runner.launcher.graphs = Spy()  # type: ignore[assignment]
    runner.launcher._captured_tokens = 16
    runner.submit(StepPlan(0, (), (RowJoin(0, tuple(range(3, 44)), 41, SamplingParams(), 0, 0.0),), ()))
    runner.collect()
    found = []
    for i, feed in enumerate((20, 16, 4, 1, 1)):  # the prompt in three pieces, and two tokens
        spy.captures.clear()
        runner.submit(StepPlan(1 + i, (), (), (RowStep(0, feed, blocks=tuple(range(12)) if not i else ()),)))
        runner.collect()
        found.append(set(spy.captures))
    assert found == [{False}, {True}, {True}, {True}, {True}]


def plan(gigabytes: int) -> MemoryPlan:
    config = RunnerConfig(device="cuda", memory=gigabytes << 30, max_context=16384)
    model = open_random("qwen3.5-27b", stored_as="UD-Q4_K_XL")
    return TorchBackend(config, present=False).plan_memory(model, EngineConfig(max_streams=4), gigabytes << 30)


def test_a_small_card_reads_prompts_in_smaller_steps() -> None:
    small, large = plan(24), plan(80)
    assert (small.prompt_tokens, small.captured_tokens) == (TIGHT.largest, TIGHT.captured)
    assert (large.prompt_tokens, large.captured_tokens) == (ROOMY.largest, ROOMY.captured)
    assert small.workspace < 0.6 * large.workspace
    assert {each.largest for each in PROMPT_STEPS} < set(TOKEN_BUCKETS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_dry_runs_give_their_memory_back() -> None:
    graphs, device = Graphs(torch.device("cuda"), True), torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs.dry_run(lambda: torch.empty(1 << 28, device=device).zero_())
    assert torch.cuda.memory_reserved() > before
    graphs.end_dry_runs()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_where_memory_is_scarce_a_capture_takes_what_was_cached() -> None:
    """A step that ran as it is has left cached what a captured one needs; both do not fit."""
    device, size = torch.device("cuda"), 1 << 28
    graphs = Graphs(device, True, scarce=True)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * size) / total)
    try:
        for _ in range(3):  # as it is, captured, again
            graphs.run("large", "kind", lambda: torch.empty(size, dtype=torch.uint8, device=device).zero_())
        assert len(graphs) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_dry_runs_with_library_products_give_their_memory_back() -> None:
    graphs, device = Graphs(torch.device("cuda"), True), torch.device("cuda")
    a = torch.ones(512, 512, device=device, dtype=torch.bfloat16)
    torch.mm(a, a)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs.dry_run(lambda: torch.mm(torch.empty(1 << 15, 512, device=device, dtype=torch.bfloat16), a))
    graphs.end_dry_runs()
    assert torch.cuda.memory_reserved() == before
