"""`slipstream selfcheck` on a tiny model: what it finds, what it prints, and that it notices wrong tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from slipstream.bench.kinds.selfcheck import Findings, check, report
from slipstream.commands.options import ModelOptions
from slipstream.engine.contract import StepPlan, StepResult

PROMPTS = [[random.Random(i).randrange(tiny.VOCAB) for _ in range(5 + i)] for i in range(4)]


@pytest.fixture(scope="module", params=["torch", "mlx"])
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    if request.param == "mlx":
        pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path_factory.mktemp("tiny"), head=True)
    return ModelOptions(model=str(folder), runner=request.param, max_streams=4, kv_memory=50_000_000, dtype="float32")


@pytest.fixture(scope="module")
def found(options: ModelOptions) -> Findings:
    return check(options.open(), options, PROMPTS, 6)


def test_it_finds_equal_tokens_and_costs(options: ModelOptions, found: Findings) -> None:
    assert found.good
    assert set(found.different) == {"greedy", "seeded", "penalties"}
    sizes = [n for n, _ in found.costs.verify]
    # MLX stops timing larger sizes when its time is up, however slow the machine.
    assert sizes[-1] == 4 * 5 or (options.runner == "mlx" and len(sizes) >= 2)
    assert all(seconds > 0 for _, seconds in (*found.costs.verify, *found.costs.draft))
    assert [speed.streams for speed in found.speeds] == [1, 4]
    for speed in found.speeds:
        assert speed.plain.num_tokens == 6 * speed.streams
        assert speed.plain.tokens == speed.drafting.tokens
        assert (speed.peer is not None) == (options.runner == "mlx")


def test_the_report_can_be_pasted(options: ModelOptions, found: Findings) -> None:
    text = report("tiny", found)
    assert "selfcheck: passed" in text
    assert "greedy: 4 of 4 equal" in text
    assert "drafts with its head" in text
    assert "Every step drafted 2 deep" in text
    peer = " mlx-lm's batches tok/s |" if options.runner == "mlx" else ""
    assert f"| streams | plain tok/s | depth 2 tok/s | ratio | tokens a step of all |{peer}\n" in text
    assert str(Path(str(options.model)).parent) not in text


class Tampering:
    """A runner that draws another token for the last row whenever rows run together."""

    def __init__(self, runner: object) -> None:
        self._runner = runner
        self.info = runner.info  # type: ignore[attr-defined]
        self.calibrate = runner.calibrate  # type: ignore[attr-defined]

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)  # type: ignore[attr-defined]

    def collect(self) -> StepResult:
        result: StepResult = self._runner.collect()  # type: ignore[attr-defined]
        if len(result.rows) < 2 or not result.rows[-1].tokens:
            return result
        *others, last = result.rows
        wrong = ((last.tokens[0] + 1) % tiny.VOCAB, *last.tokens[1:])
        return replace(result, rows=(*others, replace(last, tokens=wrong)))


def test_wrong_tokens_are_noticed(
    options: ModelOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = type(options.backend)
    load = backend.load
    monkeypatch.setattr(backend, "load", lambda *given: Tampering(load(*given)))
    found = check(options.open(), options, PROMPTS, 3)
    assert not found.good
    said = capsys.readouterr().err
    for part in (
        "measuring what steps cost",
        *(f"equality, {kind}: 5 of 5" for kind in found.different),
        "speed: 2 of 2",
    ):
        assert part in said
    assert "selfcheck: FAILED" in report("tiny", found)
