"""The choice of a backend. No array library is imported before its backend is chosen."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from slipstream.config import RunnerConfig
from slipstream.errors import ConfigError
from slipstream.runners.backend import Backend


def choose_backend(config: RunnerConfig, present: bool = True) -> Backend:
    """ConfigError where it is not installed, or its device is missing.

    ``present`` False: to plan for a device that is not here.
    """
    if choose_library(config.runner) == "mlx":
        if config.for_triton:
            raise ConfigError(f"{config.for_triton} needs the Triton kernels of a CUDA GPU, but the runner is mlx")
        from slipstream.runners.mlx.backend import MlxBackend  # an array library is imported by its own backend only

        return MlxBackend(config)
    from slipstream.runners.torch.backend import TorchBackend

    return TorchBackend(config, present)


def choose_library(name: str) -> str:
    """``auto``: MLX on a Mac that has it, PyTorch elsewhere."""
    installed = find_spec("mlx") is not None and find_spec("mlx_lm") is not None
    if name == "mlx" and not installed:
        raise ConfigError("runner mlx needs MLX and mlx-lm: in the repository, pip install '.[mlx]'")
    if name == "auto":
        return "mlx" if sys.platform == "darwin" and installed else "torch"
    return name
