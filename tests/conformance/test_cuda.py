"""On a GPU, with PyTorch's own operations: float32 tokens equal the CPU's. Skipped where there is none."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from harness import Ask, LateRunner, Traffic, alone, open_runner

from slipstream.config import EngineConfig
from slipstream.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
CONFIG = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)


def traffic(seed: int = 0) -> list[Ask]:
    chance = random.Random(seed)
    asks = []
    for i in range(6):
        prompt = tuple(chance.randrange(tiny.VOCAB) for _ in range(chance.randrange(1, 40)))
        params = SamplingParams(temperature=chance.choice([0.0, 0.9]), max_tokens=24, draft=i % 5, seed=i)
        params = replace(params, top_p=chance.choice([1.0, 0.9]), presence_penalty=chance.choice([0.0, 0.5]))
        asks.append(Ask(prompt, replace(params, p_min=chance.choice([0.0, 0.1])), arrival=chance.randrange(6)))
    return asks


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_tokens_equal_the_cpus(tmp_path: Path, kind: str) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    cpu = open_runner(folder, head=True)
    gpu = open_runner(folder, head=True, device="cuda", kv_memory=4_000_000)
    asks = traffic()
    wanted = [alone(cpu, ask) for ask in asks]
    assert Traffic(gpu, CONFIG).run(asks) == wanted
    assert Traffic(LateRunner(gpu), CONFIG).run(asks) == wanted
