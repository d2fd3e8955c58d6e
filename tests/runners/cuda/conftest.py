"""The Triton kernels on the GPU, or on the CPU in Triton's interpreter (tests/conftest.py switches it on)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
