"""Several answers to one prompt on real caches: each is that of a request of its own, the prompt computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from harness import Ask, Traffic, open_runner, run_alone
from traffic import check_stream

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner, StepPlan, StepResult
from slipstream.sampling import SamplingParams

KINDS = ["llama-gqa-tied", "qwen3_5"]
LENGTHS = [2, 9, 20]  # of the prompt: less than a block, a full block to share, one and a piece to copy


class Counter:
    """Passes plans through and counts the tokens that were fed without a draw: a prompt's, but for its last one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.info = runner.info
        self.num_read = 0

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self.num_read += sum(row.num_fed for row in result.rows if not row.tokens)
        return result


def check_family(runner: Runner, length: int) -> None:
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=12, draft=2, logprobs=1, prompt_logprobs=1)
    ask = Ask(tuple(range(1, length + 1)), params, n=4)
    counter = Counter(runner)
    run = Traffic(counter, EngineConfig(max_streams=4, max_step_tokens=12, min_chunk=4, block_size=8))
    run.run([ask])
    assert (run.num_forks, counter.num_read) == (3, length - 1)
    for key, one in enumerate(ask.each):
        check_stream(run, str(key), one, run_alone(runner, one), tolerance=1e-3)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_family(tmp_path: Path, kind: str, length: int, kv_dtype: str) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    check_family(open_runner(folder, head=True, kernels=True, kv_dtype=kv_dtype), length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_on_mlx(tmp_path: Path, kind: str, length: int) -> None:
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    from mlx_tiny import open_mlx

    check_family(open_mlx(tiny.save(tiny.build(kind), tmp_path, head=True)), length)
