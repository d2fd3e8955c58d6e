"""Rejected drafts leave nothing behind: memory stays where it was, and no buffer of the caches is ever copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
import tiny
from drafters import ScriptedDrafter
from mlx_tiny import open_mlx

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import DraftRequest, Keep, RowJoin, RowStep, StepPlan
from slipstream.errors import ConfigError
from slipstream.load import open_model
from slipstream.runners.mlx.backend import MlxBackend
from slipstream.runners.mlx.caches import KvCache
from slipstream.runners.mlx.gdn import GdnCache
from slipstream.runners.mlx.loading import MlxRunner
from slipstream.sampling import SamplingParams

ROWS = 3
DEPTH = 2
BANNED = 5  # what the script says next everywhere and a bias has made impossible: every draft is rejected
PROMPT = 400  # long enough that a buffer is larger than everything else of a step: a copy of one would show


@pytest.fixture(params=["llama-gqa-tied", "qwen3_5"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> MlxRunner:
    runner = open_mlx(tiny.save(tiny.build(request.param), tmp_path, head=True))
    runner.drafter = ScriptedDrafter({i: [BANNED] * 2 * PROMPT for i in range(ROWS)}, tiny.VOCAB, "right", DEPTH)
    return runner


def started(runner: MlxRunner) -> Iterator[None]:
    """Prompts of different lengths, then steps that each reject every draft, without end."""
    params = SamplingParams(temperature=0.0, logit_bias={BANNED: -1000.0})
    joins = tuple(RowJoin(i, (1 + i,) * (PROMPT - 7 * i), PROMPT - 7 * i, params, i, 0.0) for i in range(ROWS))
    runner.submit(StepPlan(0, (), joins, tuple(RowStep(i, PROMPT, DraftRequest(DEPTH)) for i in range(ROWS))))
    runner.collect()
    step = 1
    while True:
        runner.submit(StepPlan(step, (), (), tuple(RowStep(i, 1 + DEPTH, DraftRequest(DEPTH)) for i in range(ROWS))))
        assert all(row.num_fed == 1 + DEPTH and len(row.tokens) == 1 for row in runner.collect().rows)
        step += 1
        yield


def cache_arrays(runner: MlxRunner) -> list[mx.array]:
    return [array for cache in runner.model.all_caches for array in cache.arrays()]


def buffer_bytes(runner: MlxRunner) -> int:
    """The smallest buffer of an attention layer."""
    return min(array.nbytes for cache in runner.model.caches if isinstance(cache, KvCache) for array in cache.arrays())


def peaks(runner: MlxRunner, num_steps: int, steps: Iterator[None]) -> list[int]:
    """Bytes that each step took beside what was there before it."""
    taken = []
    for _ in range(num_steps):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        next(steps)
        taken.append(mx.get_peak_memory() - before)
    return taken


def rewind(runner: MlxRunner) -> None:
    """Every row forgets what it has said, so that a thousand steps stay within the context."""
    for slot in range(ROWS):
        row = runner.rows[slot]
        del row.tokens[PROMPT - 7 * slot + 1 :]
        row.cursor = len(row.tokens) - 1


def test_a_thousand_rejections_leave_memory_where_it_was(runner: MlxRunner) -> None:
    steps = started(runner)
    for _ in range(20):
        next(steps)
    rewind(runner)
    active, largest = mx.get_active_memory(), max(peaks(runner, 20, steps))
    num_rejected = 0
    while num_rejected < 1000:
        rewind(runner)
        assert max(peaks(runner, 20, steps)) <= largest * 1.1
        num_rejected += 20 * ROWS
    assert mx.get_active_memory() <= active * 1.01


def test_no_buffer_is_copied(runner: MlxRunner) -> None:
    """A step takes less memory than one more buffer of one layer would: so it made none."""
    steps = started(runner)
    next(steps)
    largest = max(peaks(runner, 10, steps))
    assert largest < buffer_bytes(runner)


def test_a_held_buffer_shows(runner: MlxRunner) -> None:
    """What the other test relies on: when somebody holds on to a buffer, a step copies it and takes that much more."""
    steps = started(runner)
    next(steps)
    held = [array[:1] for array in cache_arrays(runner)]
    mx.eval(held)
    assert max(peaks(runner, 1, steps)) > buffer_bytes(runner)
    assert held


def test_a_row_that_moves_copies_itself_only(runner: MlxRunner) -> None:
    steps = started(runner)
    next(steps)
    cache = next(cache for cache in runner.model.caches if isinstance(cache, KvCache))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cache.move(2, 0)
    mx.eval(cache.arrays())
    assert mx.get_peak_memory() - before < buffer_bytes(runner)


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5"])
def test_what_streams_take_is_predicted(
    tmp_path: Path, kind: str, num_streams: int, build: Callable[[Path, int, int], MlxRunner]
) -> None:
    """Rows at full length, all blocks kept, and as many states as there is room for."""
    runner = build(tiny.save(tiny.build(kind), tmp_path, head=True), 500_000, num_streams)
    info, size = runner.info, runner.info.block_size
    assert 32 <= info.max_context < 512
    prompt, num_own = (1,) * (info.max_context - 1), info.num_blocks // num_streams
    joins = tuple(RowJoin(i, prompt, len(prompt), SamplingParams(temperature=0.0), i, 0.0) for i in range(num_streams))
    keep = Keep(min(num_own, len(prompt) // size) * size, info.num_slots if info.num_states else None)
    rows = [
        RowStep(i, len(prompt), DraftRequest(2), tuple(range(i * num_own, i * num_own + num_own)), (keep,))
        for i in range(num_streams)
    ]
    runner.submit(StepPlan(0, (), joins, tuple(rows)))
    runner.collect()
    assert runner.model.blocks is not None
    taken = sum(array.nbytes for array in cache_arrays(runner)) + runner.model.blocks.num_bytes
    taken += info.num_states * (state_bytes(runner) // num_streams)
    assert 400_000 < taken <= 500_000 + size * KV_BYTES


KV_BYTES = 1024  # a token's, in both


def state_bytes(runner: MlxRunner) -> int:
    """Of the rows that run."""
    return sum(array.nbytes for cache in runner.model.caches if isinstance(cache, GdnCache) for array in cache.arrays())


def test_a_kept_state_holds_nothing_else(tmp_path: Path) -> None:
    """Three rows are computed in one array: when they leave, only the state stays that one of them kept."""
    runner = open_mlx(tiny.save(tiny.build("qwen3_5"), tmp_path, head=True))
    runner.drafter = ScriptedDrafter({}, tiny.VOCAB, "wrong", 0)
    params = SamplingParams(temperature=0.0)
    joins = tuple(RowJoin(i, (1 + i,) * 8, 8, params, i, 0.0) for i in range(ROWS))
    left = []
    for state_slot in (4, 4, 5):
        keep = Keep(8, state_slot)
        rows = tuple(RowStep(i, 8, blocks=(i,), keeps=(keep,) if i == 1 else ()) for i in range(ROWS))
        runner.submit(StepPlan(0, (), joins, rows))
        runner.collect()
        state = state_bytes(runner) // ROWS
        runner.submit(StepPlan(1, tuple(range(ROWS)), (), ()))
        runner.collect()
        left.append(mx.get_active_memory())
    assert left[1] - left[0] < state  # the same slot: it was replaced
    assert state <= left[2] - left[1] < 2 * state  # in whole pages


@pytest.mark.parametrize("kind", ["default", "llama-gqa-tied", "qwen3_5_moe"])
def test_weights_take_what_was_planned(tmp_path: Path, kind: str) -> None:
    """Planned from headers: a GGUF is not even read."""
    folder = None if kind == "default" else str(tiny.save(tiny.build(kind), tmp_path, head=True))
    model, engine = open_model(folder, any_architecture=True), EngineConfig(max_streams=2)
    backend = MlxBackend(RunnerConfig(kv_memory=50_000_000))
    plan = backend.plan_memory(model, engine)
    read: list[int] = []
    runner = backend.load(model, engine, plan, read.append)
    assert sum(read) == model.num_bytes
    assert runner.info.num_blocks == plan.num_blocks
    assert plan.caches <= 50_000_000 + 2 * plan.block_size * plan.kv_per_token
    weights = backend.step_traffic(model)
    assert weights.dense + weights.experts <= plan.weights
    assert (weights.experts > 0) == (weights.expert_share < 1.0) == (kind == "qwen3_5_moe")
    assert weights.head_dense + weights.head_experts == plan.head


@pytest.mark.parametrize("free", [1 << 30, 100 << 30])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_no_more_states_are_planned_than_blocks_can_end(tmp_path: Path, kind: str, free: int) -> None:
    """However much memory there is: of a small model, a tenth of it would be states that nobody can keep."""
    model = open_model(str(tiny.save(tiny.build(kind), tmp_path, head=True)), any_architecture=True)
    plan = MlxBackend(RunnerConfig()).plan_memory(model, EngineConfig(max_streams=4), free=free)
    assert plan.max_context == model.spec.max_context
    assert plan.num_states == plan.num_blocks
    assert plan.kept_states < 4_000_000


def test_too_little_memory_is_said(tmp_path: Path, build: Callable[[Path, int, int], MlxRunner]) -> None:
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path, head=True)
    with pytest.raises(ConfigError, match="give more kv_memory or allow fewer max_streams"):
        build(folder, 40_000, 2)


@pytest.fixture
def build() -> Callable[[Path, int, int], MlxRunner]:
    def open_sized(folder: Path, kv_memory: int, num_streams: int) -> MlxRunner:
        model = open_model(str(folder), any_architecture=True)
        return MlxBackend(RunnerConfig(kv_memory=kv_memory)).load(model, EngineConfig(max_streams=num_streams))

    return open_sized
