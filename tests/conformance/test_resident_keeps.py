"""The device-resident runner: a row that starts from what another row kept goes on as if it had read everything.

On a GPU its steps are captured; without one the same code runs in Triton's interpreter, which is slow: models of one
layer of each kind, and short rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny
import torch
from harness import open_resident

from slipstream.engine.contract import DraftRequest, Keep, RowJoin, RowResult, RowStep, Start, StepPlan
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.sampling import SamplingParams

pytest.importorskip("triton")
BLOCK, DEPTH = 8, 2
PROMPT = tuple((7 * i) % tiny.VOCAB for i in range(34))
BLOCKS = tuple(range(5, 11))  # of the row that reads everything
HOT = SamplingParams(temperature=4.0, seed=3, max_tokens=60, logprobs=2)  # so hot that drafts are often right


@dataclass
class Stream:
    """A row driven by hand, a step after the other."""

    runner: CudaRunner
    slot: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    start: Start = field(default_factory=Start)
    depth: int = DEPTH
    keeps: tuple[Keep, ...] = ()
    results: list[RowResult] = field(default_factory=list)

    def read(self, num_tokens: int) -> None:
        """It joins and reads so many tokens."""
        may_draft = self.depth > 0
        join = RowJoin(self.slot, self.tokens, len(PROMPT), HOT, 3, 0.0, may_draft=may_draft, start=self.start)
        more = self.blocks[len(self.start.blocks) :]
        step = RowStep(self.slot, num_tokens, DraftRequest(self.depth), more, self.keeps)
        self._run(StepPlan(0, (), (join,), (step,)))

    def decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = RowStep(self.slot, 1 + self.depth, DraftRequest(self.depth), keeps=self.keeps)
            self._run(StepPlan(0, (), (), (step,)))

    def leave(self) -> None:
        self.runner.submit(StepPlan(0, (self.slot,), (), ()))
        self.runner.collect()

    def _run(self, plan: StepPlan) -> None:
        self.runner.submit(plan)
        (row,) = self.runner.collect().rows
        self.tokens += row.tokens
        self.results.append(row)


def warm(cold: Stream, slot: int, num_known: int) -> Stream:
    """A row that knows the first tokens of another and starts where that one kept what it had computed."""
    (keep,) = cold.keeps
    shared = cold.blocks[: keep.position // BLOCK]
    own = tuple(range(20, 20 + len(cold.blocks) - len(shared)))
    start = Start(keep.position, shared, state_of=keep.state)
    return Stream(cold.runner, slot, cold.tokens[:num_known], shared + own, start, cold.depth)


# In 16 bits a state is rounded after a chunk or after each token: which, depends on where a prompt is taken up.
TOLERANCE = {"float32": 1e-3, "float16": 1e-2}


def check(got: list[RowResult], wanted: list[RowResult], state_dtype: str = "float32") -> None:
    for row, other in zip(got, wanted, strict=True):
        assert (row.tokens, row.drafts) == (other.tokens, other.drafts)
        for found, expected in zip(row.logprobs, other.logprobs, strict=True):
            assert found.logprob == pytest.approx(expected.logprob, abs=TOLERANCE[state_dtype])


_HYBRID = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS = {
    "llama": lambda: tiny.llama(2, 1, tied=True, num_hidden_layers=1),
    "qwen3_5": lambda: tiny.hybrid(**_HYBRID),
    "qwen3_5_moe": lambda: tiny.moe(**_HYBRID, num_experts=2, num_experts_per_tok=1),
}


def opened(folder: Path, kind: str, state_dtype: str = "float32") -> tuple[CudaRunner, Keep]:
    """A runner, and the first position that a row can keep there."""
    torch.manual_seed(0)
    model = tiny.randomise(MODELS[kind]())
    saved = tiny.save(model, folder, head=True)
    info = (runner := open_resident(saved, max_depth=DEPTH, state_dtype=state_dtype)).info
    assert (info.num_states > 0) == (kind != "llama")
    return runner, Keep(info.keep_grid, info.num_slots + info.num_states - 1 if info.num_states else None)


@pytest.mark.each_value
@pytest.mark.parametrize("depth", [DEPTH, 0])
@pytest.mark.parametrize(("kind", "state_dtype"), [*((kind, "float32") for kind in MODELS), ("qwen3_5", "float16")])
def test_from_a_state_kept_while_a_prompt_is_read(tmp_path: Path, kind: str, state_dtype: str, depth: int) -> None:
    runner, keep = opened(tmp_path, kind, state_dtype)
    length = keep.position + 2
    cold = Stream(runner, 0, PROMPT[:length], BLOCKS, depth=depth, keeps=(keep,))
    cold.read(length)
    cold.decode(2)
    cold.leave()
    again = warm(cold, 1, length)
    again.read(2)
    again.decode(2)
    check(again.results, cold.results, state_dtype)
    assert (len(cold.results[0].drafts) > 0) == (depth > 0)


@pytest.mark.parametrize("state_dtype", ["float32", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_from_a_state_kept_while_decoding(tmp_path: Path, state_dtype: str) -> None:
    """The position is passed among accepted drafts; the plans name it before and after."""
    runner, keep = opened(tmp_path, "qwen3_5", state_dtype)
    length, num_known = keep.position - 2, keep.position + 1
    cold = Stream(runner, 0, PROMPT[:length], BLOCKS, keeps=(keep,))
    cold.read(length)
    cold.decode(3)
    cold.leave()
    assert len(cold.results[1].tokens) > 1, "no draft was accepted on the way"
    again = warm(cold, 1, num_known)
    again.read(num_known - keep.position)
    again.decode(1)
    assert again.tokens == cold.tokens[: len(again.tokens)]
    got = [each.logprob for row in again.results for each in row.logprobs]
    wanted = [each.logprob for row in cold.results for each in row.logprobs][num_known - length :]
    assert got == pytest.approx(wanted[: len(got)], abs=TOLERANCE[state_dtype])


def test_no_state_is_kept_elsewhere(tmp_path: Path) -> None:
    """Neither off the grid nor in the slot of a row."""
    runner, keep = opened(tmp_path, "qwen3_5")
    for wrong in (Keep(keep.position - 1, keep.state), Keep(0, keep.state), Keep(keep.position, 1)):
        with pytest.raises(AssertionError):
            runner.submit(StepPlan(0, (), (), (RowStep(0, 1, keeps=(wrong,)),)))
