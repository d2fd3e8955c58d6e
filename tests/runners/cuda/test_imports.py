"""No GPU is asked anything when modules are imported, and each one is asked about itself."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from slipstream.runners.cuda.kernels import pdl
from slipstream.runners.cuda.kernels.gpus import Gpu, gpu

SCRIPT = """
import importlib, pkgutil
import torch

def refuse(*_, **__):
    raise AssertionError("a GPU was asked at import")

asked = ("is_available", "init", "_lazy_init", "device_count", "current_device", "current_stream", "synchronize",
         "get_device_capability", "get_device_properties", "get_device_name", "mem_get_info")
for name in asked:
    setattr(torch.cuda, name, refuse)
import slipstream.runners.cuda as package
names = [each.name for each in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(*names)
"""


def test_imports_ask_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert "slipstream.runners.cuda.runner" in names
    assert "slipstream.runners.cuda.kernels.matmul.linear_prefetch" in names
    assert len(names) > 30


def test_each_gpu_is_asked_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (8, 9) if device.index == 0 else (9, 0)

    properties = SimpleNamespace(multi_processor_count=132)
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 99 << 10})
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    old, new = torch.device("cuda:0"), torch.device("cuda:1")
    gpu.cache_clear()
    try:
        assert pdl.pdl_options(new) == {"launch_pdl": True}
        assert pdl.pdl_options(old) == pdl.pdl_options(torch.device("cpu")) == {}
        assert gpu(new) == Gpu((9, 0), 99 << 10, 132, has_pdl=True)
        assert not gpu(old).multiplies_from_shared
    finally:
        gpu.cache_clear()
    assert asked == [new, old]
