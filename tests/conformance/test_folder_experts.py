"""Folders whose experts are in different types, on the GPU's runner: tokens, and the memory that was planned for them.

On a GPU, or on the CPU in Triton's interpreter. tests/runners/cuda/test_mixed_experts.py has the products.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_packed
from harness import Traffic, alone, open_resident, open_runner
from test_mixed_experts import held_bytes
from test_resident import ON_GPU, check_tokens, traffic

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load import OpenedModel
from slipstream.load.hf.folder import open_hf
from slipstream.runners.cuda.model.mixed_experts import MixedExperts
from slipstream.runners.cuda.platform import cuda_platform
from slipstream.runners.torch.memory import plan_memory
from slipstream.runners.torch.models.layers import Sequential
from slipstream.runners.torch.models.qwen3_5_moe import SparseMlp

CONFIG = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
MIXES = ["experts-in-fp8-and-nvfp4", "experts-in-int4-and-fp8", "experts-in-int4-and-bfloat16"]


@pytest.mark.parametrize("name", MIXES)
def test_experts_take_what_was_planned(tmp_path: Path, name: str) -> None:
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    checkpoint = open_hf(tmp_path)
    runner = open_resident(tmp_path, dtype="auto")
    assert isinstance(runner.decoder.layers, Sequential)
    sparse = [layer.mlp for layer in runner.decoder.layers.layers]
    held = 0
    for mlp in sparse:
        assert isinstance(mlp, SparseMlp)
        assert isinstance(mlp.experts, MixedExperts)
        held += held_bytes(mlp.experts)
    options = RunnerConfig(runner.kv.buffer.device.type, kv_memory=4_000_000)
    model = OpenedModel("tiny", tmp_path, checkpoint, checkpoint, "")
    platform = cuda_platform(runner.kv.buffer.device, options, checkpoint.spec)
    assert dict(plan_memory(model, platform, CONFIG, options).weight_parts)["experts"] == held


@pytest.mark.parametrize("name", MIXES if ON_GPU else [pytest.param(MIXES[0], marks=pytest.mark.exhaustive)])
def test_tokens_equal_the_cpus(tmp_path: Path, name: str) -> None:
    tiny_packed.save(tiny_packed.LAYOUTS[name], tmp_path)
    asks = traffic(6, 40) if ON_GPU else traffic(2, 5)  # the interpreter is slow
    cpu = open_runner(tmp_path, head=True)
    wanted = [alone(cpu, ask) for ask in asks]
    check_tokens(Traffic(open_resident(tmp_path, rounded="stored"), CONFIG), asks, wanted)
