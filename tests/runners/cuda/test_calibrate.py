"""What calibration times on a GPU, with made-up seconds; and that its steps run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import StepCosts
from slipstream.load.random.model import open_random
from slipstream.runners.cuda import calibrate
from slipstream.runners.cuda.launch import StepLauncher
from slipstream.runners.cuda.layout import TOKEN_BUCKETS, Layout, bucket
from slipstream.runners.cuda.platform import cuda_platform
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.runners.torch.loading import load_runner

STREAMS = 8
SLOPE = 3e-10  # seconds of a token for each before it
OF_PIECE = 4e-8  # seconds of a piece for each token before it


@pytest.fixture(scope="module")
def runner(device: torch.device) -> CudaRunner:
    engine = EngineConfig(max_streams=STREAMS)
    config = RunnerConfig(device.type, "float32", kv_memory=4_000_000, max_context=1024)
    model = open_random("tiny")
    found = load_runner(model, engine, config, cuda_platform(device, config, model.spec))
    assert isinstance(found, CudaRunner)
    return found


def level(num_tokens: int) -> float:
    return 0.01 * max(1.0 + 0.6 * num_tokens / 256, 1.6 * num_tokens / 256)


@pytest.mark.parametrize(("slower", "large"), [(1.0, {1024}), (4.0, set())])
def test_reading_is_timed_in_few_steps(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, slower: float, large: set[int]
) -> None:
    """``large``: sizes that only a fast GPU is timed with."""
    timed: list[Layout] = []
    captured: list[Layout] = []

    def seconds(launcher: StepLauncher, layout: Layout, rounds: int, *rows: int) -> tuple[float, float]:
        timed.append(layout)
        known, _, num_uncomputed = (*rows, 1)[:3]
        num_tokens = layout.shape.num_tokens
        before = known - num_uncomputed if layout.shape.has_prompts else 0
        attending = before * (OF_PIECE + SLOPE * num_tokens)
        return slower * level(num_tokens) + attending, 0.001

    monkeypatch.setattr(calibrate, "_timed", seconds)
    monkeypatch.setattr(calibrate, "_run_twice", lambda launcher, layout: captured.append(layout))
    monkeypatch.setattr(calibrate, "warm_up", lambda *arguments: None)
    monkeypatch.setattr(runner.launcher, "device", SimpleNamespace(type="cuda"))
    costs = calibrate.measure(runner.launcher, STREAMS)
    assert dict(costs.read) == {
        **{n: pytest.approx(slower * level(n)) for n in {*calibrate.READ_SIZES, *large}},
        **{n + 1: pytest.approx(slower * level(to)) for n, to in zip(calibrate.READ_SIZES, calibrate.READ_SIZES[1:])},
    }
    assert costs.read_context == (pytest.approx(OF_PIECE), pytest.approx(SLOPE))
    prompts = [layout.shape for layout in timed if layout.shape.has_prompts]
    assert len(prompts) == len(calibrate.READ_SIZES) + len(large) + 2
    assert len(set(prompts)) == len(calibrate.READ_SIZES) + len(large)  # a long context needs no graph of its own
    mixed = {(layout.shape.num_rows, layout.shape.num_tokens) for layout in captured if layout.shape.has_prompts}
    assert mixed == {(2, 320), (4, 320), (8, 320)}  # at most twice as long as without the prompt


@pytest.mark.parametrize(("captured", "num_runs"), [(True, 3), (False, 2)])
def test_the_first_run_of_a_size_is_not_timed(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, captured: bool, num_runs: int
) -> None:
    """It takes memory and compiles. A second one may be captured; of steps that never are, it is timed."""
    runs: list[float] = []

    def once(*_: Any) -> tuple[float, float]:
        runs.append(10.0 - len(runs))
        return runs[-1], 0.0

    monkeypatch.setattr(calibrate, "_once", once)
    monkeypatch.setattr(runner.launcher, "_captured_tokens", 512 if captured else 64)
    assert calibrate._read_seconds(runner.launcher, 512) == runs[-1]
    assert len(runs) == num_runs


@pytest.mark.filterwarnings("ignore:invalid value")  # what a cache holds that nobody wrote
def test_steps_after_a_long_context_run(runner: CudaRunner, device: torch.device) -> None:
    with torch.inference_mode():
        seconds = calibrate._read_seconds(runner.launcher, 16, 200)
        calibrate._set_rows(runner.launcher, 0, 0)
    assert (seconds > 0.0) == (device.type == "cuda")  # no clock on a CPU


def test_nothing_is_captured_ahead_where_depths_are_not_chosen_by_cost(runner: CudaRunner) -> None:
    assert runner.calibrate([1, 2], ()) == StepCosts()


def test_buckets_are_the_sizes_of_steps(runner: CudaRunner) -> None:
    assert runner.info.step_sizes == TOKEN_BUCKETS
    assert all(bucket(TOKEN_BUCKETS, n) == n for n in (*calibrate.READ_SIZES, *calibrate.LARGE_READ_SIZES))


def test_plain_rows_lack_as_many_tokens_as_when_they_decode(runner: CudaRunner) -> None:
    """Decision 25: a row stores its state where its position and its slot add up to a multiple of four."""
    calibrate._set_rows(runner.launcher, 64, 0, 1, 3)
    state = runner.launcher.program.rows.state
    lacks = [(63 + slot - 1) % 4 for slot in range(len(state.replay))]
    assert state.replay.tolist() == lacks
    assert set(lacks) == {0, 1, 2, 3}
    calibrate._set_rows(runner.launcher, 0, 0)
    assert not state.replay.any()
