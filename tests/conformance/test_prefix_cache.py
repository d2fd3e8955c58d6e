"""The prefix cache on real caches: what a request gets does not depend on what is cached, bit for bit on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from conversations import differences, play
from harness import Limited, open_runner

KINDS = ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"]
CASES = [
    *((kind, "auto") for kind in KINDS),
    ("qwen3_5", "fp8"),
    *(pytest.param(kind, "fp8", marks=pytest.mark.exhaustive) for kind in ("llama-gqa-tied", "qwen3_5_moe")),
]


@pytest.mark.parametrize("num_tokens", [2000, 260], ids=["roomy", "tight"])
@pytest.mark.parametrize(("kind", "kv_dtype"), CASES)
def test_warm_equals_cold(tmp_path: Path, kind: str, kv_dtype: str, num_tokens: int) -> None:
    """In little memory rows are preempted, and what is cached is given back."""
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    runner = open_runner(folder, head=True, kernels=True, kv_dtype=kv_dtype)
    total = 0
    for seed in range(8):
        played = play(Limited(runner, 8, num_tokens), seed)
        assert not list(differences(runner, played)), seed
        total += played.num_cached
    assert total > 500


@pytest.mark.parametrize(("kind", "kv_dtype"), CASES)
def test_copies_in_host_memory_are_as_good(tmp_path: Path, kind: str, kv_dtype: str) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    runner = open_runner(folder, head=True, kernels=True, cache_host=8_000_000, kv_dtype=kv_dtype)
    assert runner.info.num_host_blocks
    loaded = 0
    for seed in range(6):
        played = play(Limited(runner, 8, 200), seed, 16)
        assert not list(differences(runner, played)), seed
        loaded += played.num_loaded
    assert loaded > 5
