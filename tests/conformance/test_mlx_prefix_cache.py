"""The prefix cache on MLX: what a request gets does not depend on what is cached, bit for bit with MLX's CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from conversations import differences, play
from harness import LateRunner, Limited

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

from mlx_tiny import open_mlx, packed

NUM_SEEDS = 6


@pytest.mark.parametrize(
    ("kind", "bits", "num_tokens"),
    [
        ("llama-gqa-tied", 0, 260),
        ("qwen3_5", 0, 2000),
        ("qwen3_5", 0, 260),
        pytest.param("llama-gqa-tied", 4, 2000, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5", 8, 260, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_moe", 4, 600, marks=pytest.mark.exhaustive),
    ],
)
def test_warm_equals_cold(tmp_path: Path, kind: str, bits: int, num_tokens: int) -> None:
    """In little memory rows are preempted, and what is cached is given back."""
    folder = tiny.save(tiny.build(kind), tmp_path / "raw", head=True)
    runner = open_mlx(packed(folder, tmp_path / "packed", bits) if bits else folder)
    total = 0
    for seed in range(NUM_SEEDS):
        limited = Limited(runner, 8, num_tokens)
        played = play(limited if seed % 2 else LateRunner(limited), seed)
        assert not list(differences(runner, played)), seed
        total += played.num_cached
    assert total > 500
