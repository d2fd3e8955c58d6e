"""Where a model lives and in what form: device, operations, storage format of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.config import RunnerConfig
from slipstream.errors import ConfigError
from slipstream.runners.torch.ops import Ops, TorchOps
from slipstream.runners.torch.weights import DenseFormat, LinearFormat


@dataclass(frozen=True, slots=True)
class Placement:
    ops: Ops
    form: LinearFormat
    note: str  # one line for people: what runs where

    @property
    def device(self) -> torch.device:
        return self.ops.device


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the torch runner knows the devices cpu and cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA GPU")
    return device


def place(config: RunnerConfig) -> Placement:
    device = choose_device(config.device)
    return _dense(device, config.dtype, "plain PyTorch")


def _dense(device: torch.device, dtype: str, why: str) -> Placement:
    default = "float32" if device.type == "cpu" else "bfloat16"
    name = default if dtype == "auto" else dtype
    if name == "int8":
        raise ConfigError("dtype int8 needs the CPU kernels")
    ops = TorchOps(device, getattr(torch, name))
    return Placement(ops, DenseFormat(ops), f"{device.type}, {name}, {why}")
