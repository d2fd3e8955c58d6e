"""PyTorch as a backend: our C kernels on a CPU, Triton on a CUDA GPU, plain operations where neither runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import Runner
from slipstream.errors import ConfigError
from slipstream.load import OpenedModel
from slipstream.load.random.model import RandomCheckpoint
from slipstream.load.spec import ModelSpec
from slipstream.runners.backend import GgufTensor, MemoryPlan, Progress, StepTraffic, ignore_progress
from slipstream.runners.cpu.platform import cpu_platform, find_kernels
from slipstream.runners.cpu.twin import TWINS, twin_tensors
from slipstream.runners.cuda.platform import cuda_platform, why_no_triton
from slipstream.runners.torch.device import TorchDevice
from slipstream.runners.torch.loading import load_runner
from slipstream.runners.torch.memory import limit_memory, plan_memory, step_traffic
from slipstream.runners.torch.platform import Platform, plain_platform


class TorchBackend:
    name = "torch"
    any_architecture = False
    random_shapes = True

    def __init__(self, config: RunnerConfig, present: bool = True) -> None:
        """``present`` False: to plan for a device that need not be in this machine."""
        self._config = config
        self.device = TorchDevice(choose_device(config.device, present))

    def platform(self, spec: ModelSpec) -> Platform:
        return choose_platform(self.device.torch, self._config, spec)

    def describe(self, model: OpenedModel) -> str:
        return self.platform(model.spec).note

    def plan_memory(self, model: OpenedModel, engine: EngineConfig, free: int | None = None) -> MemoryPlan:
        return plan_memory(model, self.platform(model.spec), engine, self._config, free)

    def load(
        self,
        model: OpenedModel,
        engine: EngineConfig,
        plan: MemoryPlan | None = None,
        progress: Progress = ignore_progress,
    ) -> Runner:
        """Called by the thread that will run the steps: Triton launches on its current GPU."""
        if self.device.torch.index is not None:
            torch.cuda.set_device(self.device.torch)
        if self.device.torch.type == "cuda" and self._config.memory is not None:
            limit_memory(self.device.torch, self._config.memory)
        return load_runner(model, engine, self._config, self.platform(model.spec), plan, progress)

    def step_traffic(self, model: OpenedModel) -> StepTraffic:
        return step_traffic(model, self.platform(model.spec))

    def gguf_twin(self, checkpoint: RandomCheckpoint) -> Iterator[GgufTensor]:
        dtype = self._config.dtype
        if dtype not in TWINS:
            raise ConfigError(f"a GGUF twin holds what dtype {', '.join(TWINS)} mean on a CPU, not {dtype}")
        return twin_tensors(checkpoint, dtype)

    def library_peer(self, model: OpenedModel) -> None:
        return None


def choose_device(name: str, present: bool = True) -> torch.device:
    """``present`` False: a device to plan for, which need not be in this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the torch runner knows the devices cpu and cuda, not {name!r}")
    if present and device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} was asked for, but PyTorch sees no CUDA GPU (slipstream plan --memory 24GiB plans for "
            "one that is not here)"
        )
    return device


def choose_platform(device: torch.device, config: RunnerConfig, spec: ModelSpec) -> Platform:
    platform = _choose_operations(device, config, spec)
    return platform.with_coded_kv() if config.kv_dtype == "fp8" else platform


def _choose_operations(device: torch.device, config: RunnerConfig, spec: ModelSpec) -> Platform:
    """Kernels where they run this model with these options, else PyTorch's own operations."""
    if device.type == "cuda":
        why = why_no_triton(config, spec)
        return cuda_platform(device, config, spec) if why is None else _plain(device, config, spec, why)
    _check_no_triton_option(config, "this is a CPU")
    kernels = find_kernels(config, spec)
    return _plain(device, config, spec, kernels) if isinstance(kernels, str) else cpu_platform(kernels, config, spec)


def _check_no_triton_option(config: RunnerConfig, why: str) -> None:
    if config.for_triton:
        raise ConfigError(f"{config.for_triton} needs the Triton kernels of a CUDA GPU, but {why}")


def _plain(device: torch.device, config: RunnerConfig, spec: ModelSpec, why: str) -> Platform:
    _check_no_triton_option(config, why)
    return plain_platform(device, config, spec, f"plain PyTorch operations: {why}")
