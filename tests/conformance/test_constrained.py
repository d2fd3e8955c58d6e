"""Constrained streams among plain ones, on every runner: what they say is what they may say, drafting or not.

That it depends on neither company nor speculation, for any traffic, is in the equality tests; here it is the meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import tiny
from constrained import CHARACTERS, END, NAMES, SCHEMA, constraint, tokenizer
from harness import Ask, LateRunner, Traffic, alone, open_runner

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner, StepPlan, StepResult
from slipstream.sampling import SamplingParams
from slipstream.sampling.matcher import matcher_for

CONFIG = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
TEXTS = {
    "regex": r"[a-zA-Z]{3}(,[0-9]+)*",
    "choice": "yes|yesterday|no",
    "gbnf": r"[( a-z)]*",
    "thinking": "[^#]*#(yes|no)",
    "budget": r"[^#]{0,5}(a?#.*)?",
    "everything": "[^#aeiou]{0,3}#[b-df-hj-np-tv-z]+",
}


def on_torch(folder: Path) -> Runner:
    return open_runner(folder, head=True, kernels=True)


def on_mlx(folder: Path) -> Runner:
    from mlx_tiny import open_mlx

    return open_mlx(folder)


RUNNERS: list[Callable[[Path], Runner]] = [on_torch, *([on_mlx] if find_spec("mlx_lm") else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("qwen3_5"), tmp_path_factory.mktemp("constrained"), head=True)


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest, folder: Path) -> Runner:
    return request.param(folder)


def ask(name: str | None, **more: object) -> Ask:
    # A little help to come to an end: models with random weights rarely do.
    bias = {END: 8.0, CHARACTERS.index("#"): 4.0, CHARACTERS.index("}"): 6.0, CHARACTERS.index("]"): 6.0}
    options = {"max_tokens": 60, "draft": 3, "stop_token_ids": (END,), "logit_bias": bias, "seed": 1, **more}
    return Ask((1, 2, 3), SamplingParams(constraint=constraint(name), **options))  # type: ignore[arg-type]


def check_text(name: str, text: str) -> None:
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(TEXTS[name], text)
    if name == "gbnf":
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dead end"])
def test_outputs_are_what_was_asked_for(runner: Runner, name: str) -> None:
    asks = [ask(name, seed=seed) for seed in range(4)]
    asks[2:2] = [ask(None, seed=9, bad_words=((END,),), max_tokens=20)]
    run = Traffic(runner, CONFIG)
    outputs = run.run(asks)
    ended = 0
    for i, output in enumerate(outputs):
        assert output == alone(runner, asks[i])
        if i != 2 and run.finished[str(i)].finish_reason == "stop":
            check_text(name, tokenizer().decode(output[:-1]))
            ended += 1
    assert ended, "no output came to an end"
    assert run.finished["2"].finish_reason == "length"
    assert run.snapshot.num_draft_tokens > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_stream_that_cannot_go_on_ends_alone_with_its_text(runner: Runner, late: bool) -> None:
    asks = [ask(None, max_tokens=30, seed=3), ask("dead end"), ask("choice", seed=5)]
    run = Traffic(LateRunner(runner) if late else runner, CONFIG)
    outputs = run.run(asks)
    final = run.finished["1"]
    assert final.finish_reason == "error"
    assert "leave no token" in final.error
    assert final.stats is not None
    assert final.stats.output_tokens == len(outputs[1]) > 0
    assert re.fullmatch("[bcd]{1,6}", tokenizer().decode(outputs[1]))
    assert outputs == [alone(runner, one) for one in asks]
    assert run.snapshot.num_running == 0


def test_min_tokens_and_bad_words(runner: Runner) -> None:
    plain = replace(ask(None).params, logit_bias={END: 50.0})
    [output] = Traffic(runner, CONFIG).run([Ask((1, 2, 3), plain)])
    assert output == [END]
    [output] = Traffic(runner, CONFIG).run([Ask((1, 2, 3), replace(plain, min_tokens=7))])
    assert len(output) == 8
    assert output.index(END) == 7
    run = tuple(output[2:5])
    [without] = Traffic(runner, CONFIG).run([Ask((1, 2, 3), replace(plain, min_tokens=7, bad_words=(run,)))])
    assert without[:4] == output[:4]
    assert without[4] != output[4]


class Drafts:
    """Passes plans through, and checks that every draft of slot 0's stream may follow its tokens."""

    def __init__(self, runner: Runner, asked: Ask) -> None:
        self._runner = runner
        self.info = runner.info
        self._params = asked.params
        self._tokens: list[int] = []
        self.num_drafts = 0

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        for row in result.rows:
            self._tokens += row.tokens
            matcher = matcher_for(self._params, (END,), tiny.VOCAB)
            assert matcher is not None
            if row.drafts and END not in self._tokens:
                matcher.advance(self._tokens)
                assert len(matcher.masks(row.drafts)) == len(row.drafts) + 1
                self.num_drafts += len(row.drafts)
        return result


@pytest.mark.parametrize("name", ["schema", "regex", "gbnf"])
def test_drafts_keep_to_the_grammar(runner: Runner, name: str) -> None:
    num_drafts = 0
    for seed in range(8):
        one = ask(name, temperature=1.0, seed=seed)
        recorder = Drafts(runner, one)
        Traffic(recorder, CONFIG).run([one])
        num_drafts += recorder.num_drafts
    assert num_drafts > 20
