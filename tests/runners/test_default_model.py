"""The default model against tokens and drafts that were computed without our code (tests/data/reference.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Ask, Traffic

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import RowResult, StepPlan, StepResult
from slipstream.load import open_model
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.loading import TorchRunner
from slipstream.sampling import SamplingParams

REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "reference.json").read_text())
DEPTH = 3


class Listener:
    """Passes plans through and keeps every row's drafts by the number of tokens the row had."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.info = runner.info
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.num_drawn = 0

    def submit(self, plan: StepPlan) -> None:
        self.runner.submit(plan)

    def collect(self) -> StepResult:
        result = self.runner.collect()
        for row in result.rows:
            self._note(row)
        return result

    def _note(self, row: RowResult) -> None:
        self.num_drawn += len(row.tokens)
        if row.drafts:
            self.drafts[self.num_drawn] = row.drafts


@pytest.fixture(scope="module", params=["auto", "float32"])
def runner(request: pytest.FixtureRequest) -> TorchRunner:
    config = RunnerConfig(device="cpu", dtype=request.param, draft_vocab=0)
    return TorchBackend(config).load(open_model(), EngineConfig(max_streams=2))


def test_greedy_tokens_and_drafts_equal_the_reference(runner: TorchRunner) -> None:
    num_same = num_all = 0
    for case in REFERENCE:
        listener = Listener(runner)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=64, draft=DEPTH, stop_token_ids=(2,))
        [tokens] = Traffic(listener, EngineConfig(max_streams=2)).run([Ask(tuple(case["prompt_ids"]), params)])
        assert tokens[:48] == case["greedy_ids"]
        at = 1
        for turn in case["rounds"]:
            if at + DEPTH > len(case["greedy_ids"]):
                break  # the reference stops here; what lies behind is not in its file
            got = listener.drafts.get(at, ())
            num_same += sum(a == b for a, b in zip(got, turn["drafts"]))
            num_all += len(turn["drafts"])
            at += turn["accepted"] + 1
    assert num_all > 200
    assert num_same / num_all >= 0.95
