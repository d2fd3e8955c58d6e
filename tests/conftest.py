"""What every room's tests share: hypothesis settings, and tiny checkpoints made once."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("slipstream", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("slipstream")

# On a CPU MLX compiles its fused functions with a C++ compiler, for longer than these tests compute.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

# Tiny tensors gain nothing from a second thread, and waiting for it on a busy machine costs much.
torch.set_num_threads(1)

# Without a GPU, Triton kernels run in its interpreter. Read when a kernel is decorated, so set before any is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the whole of what is otherwise shown in part")
