"""Every stream's tokens equal its own plain one-at-a-time decoding, whatever runs beside it.

Random prompts, arrival steps, lengths, depths, aborts, block sizes, memory pressure, late results; greedy and seeded;
heads that are always right, always wrong, guessing, and the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import tiny
from drafters import ScriptedDrafter
from harness import Ask, open_runner
from hypothesis import settings
from traffic import any_traffic, check

from slipstream.runners.torch.loading import TorchRunner

KINDS = ["llama-gqa-tied", "qwen2", "qwen3_5", "qwen3_5_moe"]
# Plain PyTorch sums in an order that depends on the number of rows, so it is compared in float64, where no near-tie
# can flip; our kernels promise the same bits for any batch, tokens and log-probabilities alike.
BACKENDS = {
    "torch": ("float64", False, "auto"),
    "kernels": ("float32", True, "auto"),
    "int8": ("int8", True, "auto"),
    "torch, KV in fp8": ("float64", False, "fp8"),
    "kernels, KV in fp8": ("float32", True, "fp8"),
}
QUICK = [
    ("llama-gqa-tied", "torch"),
    ("qwen2", "int8"),
    ("qwen3_5", "kernels"),
    ("qwen3_5", "int8"),
    ("qwen3_5_moe", "kernels"),
    ("qwen2", "torch, KV in fp8"),
    ("qwen3_5", "kernels, KV in fp8"),
]
OTHERS = [case for case in product(KINDS, BACKENDS) if case not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny.save(tiny.build(kind), tmp_path_factory.mktemp(kind), head=True) for kind in KINDS}


@lru_cache
def _runner(folder: Path, backend: str, block_size: int, kv_memory: int) -> TorchRunner:
    sizes = {"streams": 4, "block_size": block_size, "kv_memory": kv_memory}
    return open_runner(folder, head=True, **_options(backend), **sizes)  # type: ignore[arg-type]


def _options(backend: str) -> dict[str, object]:
    return dict(zip(("dtype", "kernels", "kv_dtype"), BACKENDS[backend], strict=True))


@pytest.mark.parametrize(("kind", "backend"), CASES)
@settings(max_examples=25)
@any_traffic
def test_streams_equal_plain_decoding(
    folders: dict[str, Path],
    kind: str,
    backend: str,
    traffic: list[Ask],
    mode: str,
    late: bool,
    block_size: int,
    tight: bool,
    budget: int,
    floors: tuple[float, ...],
) -> None:
    # Tight: about 80 tokens for all streams together, so that they are preempted.
    kv_memory = _pool_bytes(folders[kind], backend, 80 if tight else 600)
    runner = _runner(folders[kind], backend, block_size, kv_memory)
    tolerance = 1e-4 if backend.startswith("torch") else 0.0
    check(runner, _scripted, traffic, late=late, mode=mode, budget=budget, floors=floors, tolerance=tolerance)


def _scripted(truth: Mapping[int, Sequence[int]], mode: str) -> ScriptedDrafter:
    return ScriptedDrafter(truth, tiny.VOCAB, mode)


@lru_cache
def _pool_bytes(folder: Path, backend: str, num_tokens: int) -> int:
    runner = open_runner(folder, head=True, **_options(backend))  # type: ignore[arg-type]
    per_token = runner.model.kv.buffer.nbytes // (runner.info.num_blocks * runner.info.block_size)
    states = 0
    if runner.model.gdn is not None:
        states = sum(
            t.nbytes
            for layer in runner.model.gdn.layers
            for t in (layer.state, layer.window, layer.tape_conv, layer.tape_gates)
        )
    return num_tokens * per_token + states
