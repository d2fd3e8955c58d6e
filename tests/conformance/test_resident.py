"""The device-resident runner: tokens equal the CPU runner's plain decoding, one stream at a time.

On a GPU its steps are captured; without one the same code runs in Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from operator import mul
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from constrained import NAMES, constraint
from harness import Ask, Traffic, alone, open_gguf_runner, open_resident, open_runner, run_alone
from tiny_gguf import Options
from traffic import check_stream

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, RowJoin, RowResult, RowStep, Runner, StepPlan
from slipstream.sampling import SamplingParams
from slipstream.sampling.masks import allows

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
KINDS = list(tiny.MODELS) if ON_GPU else ["llama-gqa-tied", "qwen3_5", "qwen3_5-yarn", "qwen3_5_moe"]
# The interpreter is slow: in `make test` requests are few and short. The last one has every kind of layer; plain
# models are in test_rounded.py too.
QUICK = [] if ON_GPU else [("qwen3_5_moe", 3, 4)]
LONGER = [(kind, 6, 40) if ON_GPU else pytest.param(kind, 4, 9, marks=pytest.mark.exhaustive) for kind in KINDS]


def traffic(count: int, longest: int, seed: int = 0) -> list[Ask]:
    chance = random.Random(seed)
    asks = []
    for i in range(count):
        prompt = tuple(chance.randrange(tiny.VOCAB) for _ in range(chance.randrange(1, longest)))
        params = SamplingParams(
            temperature=0.0, max_tokens=chance.randrange(4, 4 + longest // 2), draft=(3, 0, 1, 4, 2)[i % 5], seed=i
        )
        if i % 3 == 1:
            params = replace(params, temperature=0.9, top_p=chance.choice([1.0, 0.9]), top_k=chance.choice([0, 20]))
        if i % 3 == 2:
            params = replace(params, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 2.0, 5: -50.0})
        abort = 7 if i == 3 else None
        asks.append(Ask(prompt, replace(params, p_min=chance.choice([0.0, 0.02])), chance.randrange(6), abort))
    return asks


def check_tokens(run: Traffic, asks: list[Ask], wanted: Sequence[Sequence[int]]) -> None:
    for _ in range(3 if ON_GPU else 1):  # as it is, while being captured, replayed
        for i, (got, want) in enumerate(zip(run.run(asks), wanted, strict=True)):
            aborted = run.finished[str(i)].finish_reason == "abort"
            assert got == (want[: len(got)] if aborted else want), i
    assert run.snapshot.num_draft_tokens > 0


@pytest.mark.parametrize(("kind", "num_asks", "longest"), [*QUICK, *LONGER])
def test_tokens_equal_the_cpus(tmp_path: Path, kind: str, num_asks: int, longest: int) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    asks = traffic(num_asks, longest)
    cpu = open_runner(folder, head=True)
    wanted = [alone(cpu, ask) for ask in asks]
    runner = open_resident(folder)
    config = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
    run = Traffic(runner, config)
    check_tokens(run, asks, wanted)


@pytest.mark.parametrize(
    ("kind", "num_asks", "longest"),
    [("qwen3_5", 3, 4), pytest.param("llama-gqa-tied", 4, 9, marks=pytest.mark.exhaustive)],
)
def test_tokens_with_keys_and_values_in_fp8(tmp_path: Path, kind: str, num_asks: int, longest: int) -> None:
    """A rounding may differ from the CPU's by chance: here none does."""
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    asks = traffic(num_asks, longest)
    cpu = open_runner(folder, head=True, kv_dtype="fp8")
    wanted = [alone(cpu, ask) for ask in asks]
    config = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
    check_tokens(Traffic(open_resident(folder, kv_dtype="fp8"), config), asks, wanted)


@pytest.mark.exhaustive  # the kernels' own tests have this order, too
def test_a_gguf_with_its_own_order_of_heads(tmp_path: Path) -> None:
    """Blocks of several types, three value heads to a key head."""
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "linear_num_value_heads": 6}
    model = tiny_gguf.wide(linear_key_head_dim=32, linear_value_head_dim=32, hidden_size=64, head_dim=32, **sizes)
    kinds = {"attn_qkv": "Q8_0", "attn_gate": "Q4_1", "ssm_out": "IQ4_NL"}
    path = tiny_gguf.write(model, tmp_path / "x.gguf", Options(lambda name: kinds.get(name.split(".")[-2], "F32"))).path
    asks = traffic(4 if ON_GPU else 2, 40 if ON_GPU else 5)
    wanted = [alone(open_gguf_runner(path), ask) for ask in asks]
    check_tokens(Traffic(open_resident(path), EngineConfig(max_streams=4)), asks, wanted)


def constrained_traffic(count: int, max_tokens: int) -> list[Ask]:
    """Constrained rows between the others of ``traffic``; hot ones, whose drafts are often right."""
    names = [*NAMES[-2:], *NAMES[:-2]]
    asks = traffic(count, 2 * max_tokens)
    for i in range(0, count, 2):
        own = replace(asks[i].params, constraint=constraint(names[i // 2 % len(names)]), max_tokens=max_tokens, draft=3)
        asks[i] = replace(asks[i], params=replace(own, temperature=i % 4 * 2.0, stop_token_ids=(95,), min_tokens=i % 3))
    hot = replace(asks[1].params, temperature=4.0, top_k=0, top_p=1.0, max_tokens=max_tokens, draft=3, p_min=0.0)
    asks[1] = replace(asks[1], params=replace(hot, bad_words=((3,), (5, 5)), min_tokens=2))
    return asks


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["qwen3_5"])
def test_constrained_rows_equal_the_cpus(tmp_path: Path, kind: str) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    asks = constrained_traffic(16, 24) if ON_GPU else constrained_traffic(5, 8)
    cpu = open_runner(folder, head=True)
    wanted = Traffic(cpu, EngineConfig(max_streams=4))
    expected = [wanted.run([replace(ask, arrival=0, abort_at=None)])[0] for ask in asks]
    runner = open_resident(folder)
    run = Traffic(runner, EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8))
    for _ in range(3 if ON_GPU else 1):
        for i, (got, want) in enumerate(zip(run.run(asks), expected, strict=True)):
            aborted = run.finished[str(i)].finish_reason == "abort"
            assert got == (want[: len(got)] if aborted else want), i
        assert "error" in {event.finish_reason for event in run.finished.values()}, "the dead end was not met"
    assert run.snapshot.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["qwen3_5"])
def test_several_answers_and_log_probabilities(tmp_path: Path, kind: str) -> None:
    folder = tiny.save(tiny.build(kind), tmp_path, head=True)
    hot = SamplingParams(temperature=4.0, max_tokens=6, draft=2, seed=20)
    asks = [
        # Long enough for a full block to share, and read in pieces.
        Ask(tuple(range(1, 22)), replace(hot, logprobs=3, prompt_logprobs=2), n=3),
        Ask((5, 6), replace(hot, seed=30, logprobs=0, presence_penalty=0.5), arrival=2),
        Ask((7, 8, 9), replace(hot, seed=40), arrival=3, abort_at=6, n=2),
    ]
    cpu = open_runner(folder, head=True)
    config = EngineConfig(max_streams=4, max_step_tokens=14, min_chunk=4, block_size=8)
    run = Traffic(open_resident(folder), config)
    run.run(asks)
    assert run.num_forks >= 2
    assert run.snapshot.num_accepted_tokens > 0
    for key, one in enumerate(one for ask in asks for one in ask.each):
        check_stream(run, str(key), one, run_alone(cpu, one), tolerance=1e-3)


PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6), (5, 3), (5, 8, 9, 7))
DEPTH = 4


def plans(
    requests: Sequence[DraftRequest], num_steps: int, p_mins: Sequence[float] = (), constraints: Sequence[str] = ()
) -> list[StepPlan]:
    """A row a prompt, each with blocks enough. A plan's feeds are upper bounds: any runner can follow them."""
    joins = []
    for i, (prompt, _, p_min, name) in enumerate(zip_longest(PROMPTS[: len(requests)], requests, p_mins, constraints)):
        params = SamplingParams(temperature=0.0, max_tokens=40, constraint=constraint(name), stop_token_ids=(95,))
        joins.append(RowJoin(i, prompt, len(prompt), params, i, p_min or 0.0, end_tokens=(95,)))
    blocks = [tuple(range(8 * i, 8 * i + 8)) for i in range(len(joins))]
    first = [RowStep(i, len(PROMPTS[i]), request, blocks[i]) for i, request in enumerate(requests)]
    later = tuple(RowStep(i, 1 + DEPTH, request) for i, request in enumerate(requests))
    return [StepPlan(0, (), tuple(joins), tuple(first)), *(StepPlan(n, (), (), later) for n in range(1, num_steps))]


def driven(runner: Runner, steps: Sequence[StepPlan], *, late: bool = False) -> list[tuple[RowResult, ...]]:
    """The results of all steps, after which the rows leave. ``late``: a step is submitted before the last is read."""
    results = []
    last = StepPlan(len(steps), tuple(range(len(steps[0].joins))), (), ())
    for n, step in enumerate([*steps, last]):
        runner.submit(step)
        if n or not late:
            results.append(runner.collect().rows)
    if late:
        results.append(runner.collect().rows)
    return results[:-1]


def test_drafts_end_at_the_thresholds_as_on_the_cpu(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama-gqa-tied"), tmp_path, head=True)
    cpu, device = open_runner(folder, head=True), open_resident(folder)
    measured = driven(cpu, plans([DraftRequest(DEPTH, report_confidence=True)] * 4, 1))[0]
    chains = [list(accumulate(row.confidences, mul)) for row in measured]
    requests = [
        DraftRequest(DEPTH, threshold=chains[0][1] * 0.999),
        DraftRequest(DEPTH, continue_threshold=chains[1][0] * 1.001),
        DraftRequest(DEPTH),
        DraftRequest(2, report_confidence=True),
    ]
    steps = plans(requests, 2, [0.0, 0.0, measured[2].confidences[0] * 1.001])
    wanted, found = driven(cpu, steps), driven(device, steps, late=True)
    assert [len(row.drafts) for row in wanted[0]] == [2, 1, 0, 2]
    for step, expected in zip(found, wanted, strict=True):
        for i, (row, other) in enumerate(zip(step, expected, strict=True)):
            assert (row.tokens, row.drafts) == (other.tokens, other.drafts)
            assert row.confidences[: len(other.confidences)] == pytest.approx(other.confidences, rel=1e-3)
            # A pass that the CPU saves is run on a GPU, and its confidence is known.
            unsaved = len(other.drafts) < DEPTH if i == 1 else False
            assert len(row.confidences) == len(other.confidences) + unsaved


def test_no_confidence_is_reported_unasked(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama-gqa-tied"), tmp_path, head=True)
    (first, second) = driven(open_resident(folder), plans([DraftRequest(2)], 2))
    assert [len(step[0].drafts) for step in (first, second)] == [2, 2]
    assert first[0].confidences == second[0].confidences == ()


def test_first_drafts_of_constrained_rows_follow_their_grammar_as_on_the_cpu(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama-gqa-tied"), tmp_path, head=True)
    names = ["regex", "gbnf"]
    steps = plans([DraftRequest(1, report_confidence=True)] * 3, 3, constraints=names)
    wanted = driven(open_runner(folder, head=True), steps)
    found = driven(open_resident(folder), steps, late=True)
    for step, expected in zip(found, wanted, strict=True):
        assert [(row.tokens, row.drafts) for row in step] == [(row.tokens, row.drafts) for row in expected]
        for row, other in zip(step, expected, strict=True):
            assert row.confidences == pytest.approx(other.confidences, rel=1e-3)
    for i, name in enumerate(names):
        written = [token for step in found for token in step[i].tokens]
        rules = constraint(name)
        assert rules is not None
        matcher = rules.start(tiny.VOCAB, {95})
        matcher.advance(written)
        assert allows(matcher.masks(())[0], found[-1][i].drafts[0])
