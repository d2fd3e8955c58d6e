"""A server of a tiny model on the CUDA runner, its tensors on the CPU: what its steps launch is recorded, not run."""

from __future__ import annotations

import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load.random.model import open_random
from slipstream.runners.cuda import calibrate
from slipstream.runners.cuda.layout import Layout
from slipstream.runners.cuda.platform import cuda_platform
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.runners.torch.loading import load_runner


def tiny_runner(dtype: str) -> CudaRunner:
    engine, config = EngineConfig(max_streams=4), RunnerConfig("cpu", dtype, kv_memory=4_000_000, max_context=256)
    model = open_random("tiny")
    runner = load_runner(model, engine, config, cuda_platform(torch.device("cpu"), config, model.spec))
    assert isinstance(runner, CudaRunner)
    return runner


def calibration_steps(runner: CudaRunner, row_sizes: list[int]) -> tuple[list[Layout], list[Layout]]:
    """Steps as calibration runs them: those it times, and the others."""
    launcher, sizes = runner.launcher, calibrate._sizes(row_sizes, runner.program.depth)
    sampled = calibrate._layout(launcher, 1, 1, 0, plain=False)
    untimed = [*calibrate._mixed(launcher, 4, {n: 1.0 + n / 256 for n in calibrate.READ_SIZES}), sampled]
    timed = [calibrate._layout(launcher, n, num_rows, 0) for n, num_rows in sizes]
    timed += [calibrate._prompt(launcher, n) for n in calibrate.READ_SIZES]
    return timed + [calibrate._layout(launcher, n, n, depth) for n in row_sizes for depth in (1, 2)], untimed


def tiny_server() -> None:
    """All kernels of a server, sampling included."""
    runner = tiny_runner("bfloat16")
    timed, untimed = calibration_steps(runner, [1, 2, 4])
    with torch.inference_mode():
        for layout in timed + untimed:
            runner.launcher.run(layout)
