"""The memory plan is kept: byte by byte for what we allocate, within a tenth for the whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import tiny_fp8
import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.load import OpenedModel, open_model
from slipstream.load.hf.folder import open_hf
from slipstream.runners.backend import MemoryPlan
from slipstream.runners.cpu.experts import PackedExperts
from slipstream.runners.host.drafter import MtpDrafter
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.experts import ExpertList, Experts
from slipstream.runners.torch.loading import TorchRunner
from slipstream.runners.torch.memory import CUDA_PROCESS, limit_memory
from slipstream.runners.torch.ops import Linear
from slipstream.runners.torch.weights import Weights

SHAPES = ["llama-gqa-tied", "qwen2", "qwen3_5", "qwen3_5-tied-equal-heads", "qwen3_5_moe"]
FILL = """
import sys
from slipstream import LLM, SamplingParams

kv_memory, streams, most = map(int, sys.argv[1:])
with LLM(kv_memory=kv_memory, max_streams=streams) as llm:
    info = llm.engine.info
    length = min(most, info.num_blocks * info.block_size // streams - 32)
    prompts = [[20 + (37 * i + 11 * s) % 40000 for i in range(length)] for s in range(streams)]
    llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, ignore_eos=True))
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


# The second pool is not filled by tokens, it is there from the start: reading a short prompt in each stream will do.
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("kv_memory", "streams", "tokens"),
    [(120_000_000, 4, 8192), pytest.param(1_500_000_000, 8, 64, marks=pytest.mark.exhaustive)],
)
def test_the_plan_is_the_peak_of_a_run(kv_memory: int, streams: int, tokens: int) -> None:
    options = ["--kv-memory", str(kv_memory), "--max-streams", str(streams)]
    planned = json.loads(_run("-m", "slipstream.cli", "plan", "--json", *options))["total"]
    peak = int(_run("-c", FILL, str(kv_memory), str(streams), str(tokens))) * 1024
    assert peak == pytest.approx(planned, rel=0.1), f"peak {peak / 1e6:.0f} MB, planned {planned / 1e6:.0f} MB"


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Loaded:
    """A tiny model, its plan, and the bytes of every matrix and vector that its loading made."""

    def __init__(
        self, folder: Path, dtype: str, kernels: bool, monkeypatch: pytest.MonkeyPatch, kv_dtype: str = "auto"
    ) -> None:
        checkpoint = open_hf(folder)
        model = OpenedModel("tiny", folder, checkpoint, checkpoint, "")
        engine = EngineConfig(max_streams=3, block_size=8, max_depth=3)
        config = RunnerConfig("cpu", dtype, 4_000_000, kernels=kernels, kv_dtype=kv_dtype)
        self.stored = 0
        _watch(monkeypatch, self._count)
        self.plan: MemoryPlan = TorchBackend(config).plan_memory(model, engine)
        self.runner: TorchRunner = TorchBackend(config).load(model, engine)

    def _count(self, num_bytes: int) -> None:
        self.stored += num_bytes


def _watch(monkeypatch: pytest.MonkeyPatch, count: object) -> None:
    matrix, tensor, experts = Weights._matrix, Weights.tensor, Weights.experts

    def watched_matrix(self: Weights, *arguments: object) -> Linear:
        made = matrix(self, *arguments)  # type: ignore[arg-type]
        count(made.num_bytes)  # type: ignore[operator]
        return made

    def watched_tensor(self: Weights, *arguments: object) -> torch.Tensor:
        made = tensor(self, *arguments)  # type: ignore[arg-type]
        count(made.nbytes)  # type: ignore[operator]
        return made

    def watched_experts(self: Weights, *arguments: object) -> Experts:
        made = experts(self, *arguments)  # type: ignore[arg-type]
        assert isinstance(made, ExpertList | PackedExperts)
        count(made.num_bytes)  # type: ignore[operator]
        return made

    monkeypatch.setattr(Weights, "experts", watched_experts)
    monkeypatch.setattr(Weights, "_matrix", watched_matrix)
    monkeypatch.setattr(Weights, "tensor", watched_tensor)


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", False), ("float64", False), ("float32", True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_allocated_is_what_was_planned(
    shape: str, dtype: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tiny.build(shape), tmp_path, head=True)
    loaded = Loaded(folder, dtype, kernels, monkeypatch)
    assert loaded.runner.model.kv.buffer.nbytes == loaded.plan.kv_pool
    assert _state_bytes(loaded.runner) == loaded.plan.states + loaded.plan.kept_states
    assert loaded.plan.caches <= 4_000_000
    planned = loaded.plan.weights + loaded.plan.head
    # The kernels round a matrix's rows up to whole panels; merged matrices share one, the plan gives each its own.
    assert loaded.stored <= planned if kernels else loaded.stored == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", False), ("auto", True), ("bfloat16", True)])
@pytest.mark.parametrize("shape", ["qwen3_5-odd", "qwen3_5_moe"])
def test_fp8(shape: str, dtype: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(tiny_fp8.save(tiny_fp8.build(shape), tmp_path), dtype, kernels, monkeypatch)
    planned = loaded.plan.weights + loaded.plan.head
    assert 0.9 * planned <= loaded.stored <= planned if kernels else loaded.stored == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", False), ("float32", False), ("float32", True)])
@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen3_5"])
def test_keys_and_values_in_fp8(
    shape: str, dtype: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tiny.build(shape), tmp_path, head=True)
    loaded, floats = (Loaded(folder, dtype, kernels, monkeypatch, each) for each in ("fp8", "auto"))
    assert (loaded.plan.kv_dtype, floats.plan.kv_dtype) == ("fp8", dtype)
    assert loaded.runner.model.kv.buffer.nbytes == loaded.plan.kv_pool
    dim, item = loaded.runner.model.kv.layers[0].k.shape[-1], 2 if dtype == "bfloat16" else 4
    assert loaded.plan.kv_per_token * item * dim == floats.plan.kv_per_token * (dim + 2)  # a scale has two bytes
    assert loaded.plan.states == floats.plan.states
    assert _state_bytes(loaded.runner) == loaded.plan.states + loaded.plan.kept_states


def _state_bytes(runner: TorchRunner) -> int:
    layers = runner.model.gdn.layers if runner.model.gdn else []
    return sum(getattr(layer, field.name).nbytes for layer in layers for field in fields(layer))


def test_the_default_model_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, config = open_model(), EngineConfig(max_streams=1), RunnerConfig(device="cpu", max_context=64)
    stored: list[int] = []
    _watch(monkeypatch, stored.append)
    plan = TorchBackend(config).plan_memory(model, engine)
    drafter = TorchBackend(config).load(model, engine).drafter
    assert isinstance(drafter, MtpDrafter)
    stored.append(drafter._head.output.num_bytes)  # the part of the output matrix that drafts read, in 4 bits
    assert sum(stored) == pytest.approx(plan.weights + plan.head, rel=0.02)


def plan_of(kv_memory: int | None, streams: int, folder: Path) -> MemoryPlan:
    checkpoint = open_hf(folder)
    config = RunnerConfig(device="cpu", kernels=False, kv_memory=kv_memory)
    model = OpenedModel("tiny", folder, checkpoint, None, "no head")
    return TorchBackend(config).plan_memory(model, EngineConfig(max_streams=streams, block_size=8))


def test_more_than_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path)
    room = plan_of(500_000, 2, folder)
    free = room.weights + room.workspace + room.caches
    monkeypatch.setattr("slipstream.runners.torch.memory.free_bytes", lambda device: free)
    assert plan_of(500_000, 2, folder).kv_pool == room.kv_pool
    with pytest.raises(ConfigError, match=r"only 0\.5 MB are free"):
        plan_of(900_000, 2, folder)
    assert plan_of(None, 2, folder).kv_pool < room.kv_pool
    monkeypatch.setattr("slipstream.runners.torch.memory.free_bytes", lambda device: room.weights)
    with pytest.raises(ConfigError, match=r"the weights .* but 0\.\d MB are free: take a model with fewer"):
        plan_of(None, 2, folder)


def test_everything_stays_within_the_memory_that_the_operator_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runners.torch.memory.resident_bytes", lambda: 500_000_000)
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path)
    model, engine = OpenedModel("tiny", folder, open_hf(folder), None, "no head"), EngineConfig(max_streams=4)

    def plan(memory: int | None) -> MemoryPlan:
        config = RunnerConfig(device="cpu", kernels=False, memory=memory)
        return TorchBackend(config).plan_memory(model, engine)

    free = plan(None)
    least = free.total - free.kv_pool
    tight = plan(least + free.kv_pool // 3)
    assert 0 < tight.kv_pool < free.kv_pool
    assert tight.total <= least + free.kv_pool // 3
    assert plan(10**15).kv_pool == free.kv_pool  # more than there is: as if nothing was said
    with pytest.raises(ConfigError, match="give more memory, or take a model with fewer weights or with fewer bits"):
        plan(free.process)
    with pytest.raises(
        ConfigError, match=r"take \d+\.\d MB, but 0 B are free \(of the 24 B of memory the process takes"
    ):
        plan(24)  # GB were meant


def test_host_memory_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.runners.torch.memory.free_bytes", lambda device: 2_000_000_000)
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path)
    model = OpenedModel("tiny", folder, open_hf(folder), None, "no head")

    def plan(cache_host: int, free: int | None = None) -> MemoryPlan:
        config = RunnerConfig(device="cpu", kernels=False, kv_memory=8_000_000)
        return TorchBackend(config).plan_memory(model, EngineConfig(max_streams=4, cache_host=cache_host), free)

    assert 0.9e9 < plan(1_000_000_000).host_tier <= 1e9
    with pytest.raises(
        ConfigError, match=r"3.00 GB of host memory .* but (1.9\d|2.00) GB are free: give less cache_host"
    ):
        plan(3_000_000_000)
    assert plan(3_000_000_000, 4_000_000_000).host_tier > 2.9e9


def test_a_gpu_allocates_no_more_than_the_operator_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own function, up to where it would reach a GPU: it wants a float, and a GPU by its number."""
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *given: limits.append(given), raising=False)
    for memory, name in ((40 << 30, "cuda"), (1 << 50, "cuda:0"), (1, "cuda:3")):
        limit_memory(torch.device(name), memory)
    assert limits == [(((40 << 30) - CUDA_PROCESS) / (80 << 30), 1), (1.0, 0), (0.0, 3)]


def test_states_come_out_of_the_same_purse(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path)
    few, many = plan_of(500_000, 1, folder), plan_of(500_000, 8, folder)
    assert many.states == 8 * few.states
    assert many.caches <= 500_000 < many.caches + 2 * 8 * many.kv_per_token
    assert few.streams_of(10) == 1
    assert many.streams_of(10) == min(8, many.num_blocks // 2)
    with pytest.raises(ConfigError, match="left for KV"):
        plan_of(many.states, 8, folder)
