"""What one step promises: one target forward, buffers that never move, exact commits, exact history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drafters import ScriptedDrafter
from harness import Ask, Traffic, alone, open_runner

from slipstream.config import EngineConfig
from slipstream.engine.contract import DraftRequest, RowJoin, RowStep, StepPlan, StepResult
from slipstream.runners.host import deferred_feed
from slipstream.runners.host.drafter import MtpDrafter
from slipstream.runners.host.runner import HostRunner
from slipstream.sampling import SamplingParams

PROMPT = (5, 9, 2, 44, 17, 3, 3, 60, 21)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("llama-gqa-tied", "qwen3_5", "qwen3_5_moe")
    return {kind: tiny.save(tiny.build(kind), tmp_path_factory.mktemp(kind), head=True) for kind in kinds}


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 40, **options})  # type: ignore[arg-type]


LIBRARIES = ["torch", "mlx"]


def open_host(folder: Path, library: str) -> HostRunner[Any, Any]:
    """The same step on each library."""
    if library == "torch":
        return open_runner(folder, head=True, kernels=True)
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    from mlx_tiny import open_mlx

    return open_mlx(folder)


class Steps:
    """Drives one runner by hand-made plans."""

    def __init__(self, runner: HostRunner[Any, Any]) -> None:
        self.runner = runner
        self.step = 0

    def run(self, rows: list[RowStep], joins: tuple[RowJoin, ...] = (), leaves: tuple[int, ...] = ()) -> StepResult:
        self.runner.submit(StepPlan(self.step, leaves, joins, tuple(rows)))
        self.step += 1
        return self.runner.collect()


def join(slot: int, tokens: tuple[int, ...] = PROMPT, params: SamplingParams | None = None) -> RowJoin:
    params = params or greedy()
    return RowJoin(slot, tokens, len(tokens), params, params.seed or 0, params.p_min or 0.0)


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5_moe"])
def test_one_target_forward_a_step_whatever_the_depths(folders: dict[str, Path], kind: str) -> None:
    runner = open_runner(folders[kind], head=True, kernels=True)
    steps = Steps(runner)
    blocks = iter(range(runner.info.num_blocks))
    rows = [
        RowStep(slot, 9, DraftRequest(depth), tuple(next(blocks) for _ in range(8)))
        for slot, depth in enumerate([0, 1, 3])
    ]
    held = steps.run(rows, joins=tuple(join(slot) for slot in range(3)))
    assert [len(row.drafts) for row in held.rows] == [0, 1, 3]
    for _ in range(5):
        before = runner.num_forwards
        held = steps.run([RowStep(slot, 1 + depth, DraftRequest(depth)) for slot, depth in enumerate([0, 1, 3])])
        assert runner.num_forwards == before + 1
        assert [row.num_fed for row in held.rows] == [1, 2, 4]


@pytest.mark.each_value
@pytest.mark.parametrize("limit", [3, 512])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_head_that_is_fed_late_drafts_the_same(
    folders: dict[str, Path], library: str, kind: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row always drafts and is fed at once, one only now and then; both feed one token a step. Beside a third."""
    monkeypatch.setattr(deferred_feed, "MAX_DEFERRED", limit)
    monkeypatch.setattr(deferred_feed, "KEPT_DEFERRED", limit // 2)
    runner = open_host(folders[kind], library)
    steps = Steps(runner)
    fed = watch_feeds(runner)
    blocks = iter(range(runner.info.num_blocks))
    rows = [RowStep(slot, 9, DraftRequest(2), tuple(next(blocks) for _ in range(8))) for slot in range(3)]
    steps.run(rows, joins=(join(0), join(1), join(2, PROMPT[::-1])))
    waiting = 0
    for depth in [0, 0, 2, 2, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0, 2]:
        fed.clear()
        always, sometimes, _ = steps.run(
            [RowStep(0, 1, DraftRequest(2)), RowStep(1, 1, DraftRequest(depth)), RowStep(2, 4, DraftRequest(3))]
        ).rows
        assert sometimes.tokens == always.tokens
        assert sometimes.drafts == always.drafts[:depth]
        waiting += 1
        apart = waiting - 1 if depth and waiting - 1 > deferred_feed.FEW else 0
        if not depth and waiting > limit:
            apart = waiting - limit // 2
        *late, now, _, _ = fed  # two passes of the third row
        assert late == ([{1: apart}] if apart else [])
        assert now.keys() == ({0, 1, 2} if depth else {0, 2})
        waiting -= apart
        if depth:
            assert now[1] == waiting
            waiting = 0
    # Whoever comes into the slot of one that left with tokens waiting starts from nothing.
    steps.run([RowStep(1, 1)])
    fed.clear()
    steps.run([RowStep(1, 9, DraftRequest(2), tuple(next(blocks) for _ in range(8)))], joins=(join(1),), leaves=(1,))
    assert fed[0] == {1: len(PROMPT)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_tokens_that_waited_are_in_no_draft_passs_time(
    folders: dict[str, Path], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a row that is asked for a draft once in a while, to see what it gains, would make drafting look dear."""
    steps = Steps(open_host(folders["qwen3_5"], library))
    blocks = tuple(range(8))
    steps.run([RowStep(0, 9, DraftRequest(2), blocks)], joins=(join(0),))
    for _ in range(12):
        assert steps.run([RowStep(0, 1)]).late_seconds == 0.0
    drafter = steps.runner.drafter
    assert isinstance(drafter, MtpDrafter)
    slow_feed(drafter, min_tokens=12, seconds=1000.0, monkeypatch=monkeypatch)
    result = steps.run([RowStep(0, 1, DraftRequest(2))])
    assert len(result.rows[0].drafts) == 2
    assert result.late_seconds >= 1000.0
    assert result.draft_seconds < 1000.0
    assert steps.run([RowStep(0, 3, DraftRequest(2))]).late_seconds == 0.0


def slow_feed(drafter: MtpDrafter[Any, Any], min_tokens: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeding so many tokens at once takes longer, by a clock of its own."""
    forward, late, clock = drafter._head.forward, [0.0], deferred_feed.time.perf_counter

    def slow(hidden: Any, tokens: Any, batch: Any) -> Any:
        late[0] += seconds if len(tokens) >= min_tokens else 0.0
        return forward(hidden, tokens, batch)

    monkeypatch.setattr(drafter._head, "forward", slow)
    monkeypatch.setattr(deferred_feed.time, "perf_counter", lambda: clock() + late[0])


def watch_feeds(runner: HostRunner[Any, Any]) -> list[dict[int, int]]:
    """Tokens by slot in each forward of the head, as they happen."""
    drafter = runner.drafter
    assert isinstance(drafter, MtpDrafter)
    fed, spans = [], {}
    model, head = runner.model, drafter._head
    lay_out, forward = model.lay_out, head.forward

    def laid_out(rows: Any) -> Any:
        batch = lay_out(rows)
        spans[id(batch)] = batch, {span.slot: span.num_fed for span in rows}
        return batch

    def watched(hidden: Any, tokens: Any, batch: Any) -> Any:
        fed.append(spans[id(batch)][1])
        return forward(hidden, tokens, batch)

    model.lay_out, head.forward = laid_out, watched  # type: ignore[method-assign]
    return fed


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5"])
def test_buffers_never_move_through_a_thousand_rejections(folders: dict[str, Path], kind: str) -> None:
    runner = open_runner(folders[kind], head=True, kernels=True)
    ask = Ask(PROMPT, greedy(draft=4, max_tokens=60))
    wanted = alone(runner, ask)
    runner.drafter = ScriptedDrafter({0: [*PROMPT, *wanted]}, tiny.VOCAB, "wrong")
    caches = [runner.model.kv.buffer, *([layer.state for layer in runner.model.gdn.layers] if runner.model.gdn else [])]
    before = [cache.data_ptr() for cache in caches]
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    rejected = 0
    while rejected < 1000:
        assert traffic.run([ask] * 4) == [wanted] * 4
        rejected += traffic.snapshot.num_draft_tokens - traffic.snapshot.num_accepted_tokens
    assert [cache.data_ptr() for cache in caches] == before
    assert runner.model.kv.buffer.data_ptr() == runner.model.kv.layers[0].k.data_ptr()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5", "qwen3_5_moe"])
def test_commit_of_n_equals_having_written_n(folders: dict[str, Path], kind: str, accepted: int) -> None:
    """Slot 0 drafts 4 and keeps ``accepted``; slot 1 writes the same tokens one by one. Same bits in every cache."""
    runner = open_runner(folders[kind], head=True, kernels=True)
    truth = [*PROMPT, *alone(runner, Ask(PROMPT, greedy()))]
    script = list(truth)
    script[len(PROMPT) + 1 + accepted] = (script[len(PROMPT) + 1 + accepted] + 1) % tiny.VOCAB
    runner.drafter = ScriptedDrafter({0: script}, tiny.VOCAB, "right")
    steps = Steps(runner)
    steps.run([RowStep(0, 9, DraftRequest(4), (7, 3, 11)), RowStep(1, 9, blocks=(2, 9, 4))], joins=(join(0), join(1)))
    [row] = steps.run([RowStep(0, 5)]).rows
    assert list(row.tokens) == truth[len(PROMPT) + 1 : len(PROMPT) + 2 + accepted]
    steps.run([RowStep(0, 1)])  # replays what was accepted, feeds one token
    cursor = len(PROMPT) + 2 + accepted
    for _ in range(cursor - len(PROMPT)):
        steps.run([RowStep(1, 1)])
    assert runner.rows[0].cursor == runner.rows[1].cursor == cursor
    for layer in runner.model.kv.layers[:-1]:
        for cache in (layer.k, layer.v):
            mine, plain = (written(cache, blocks)[:, :cursor] for blocks in ((7, 3, 11), (2, 9, 4)))
            assert torch.equal(mine, plain)
    for state in runner.model.gdn.layers if runner.model.gdn else []:
        assert torch.equal(state.window[0], state.window[1])
        assert torch.equal(state.state[0], state.state[1])


def written(cache: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """[kv heads, tokens, dim] of one row."""
    return cache[list(blocks)].transpose(0, 1).flatten(1, 2)


class Recorder:
    """A processor that keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, logits: Any, history: Any) -> Any:
        assert history.num_prompt == len(PROMPT)
        self.seen.append(tuple(history.tokens.tolist()))
        return logits


@pytest.mark.parametrize("library", LIBRARIES)
def test_processors_see_each_token_of_the_history_once(
    folders: dict[str, Path], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_host(folders["llama-gqa-tied"], library)
    truth = [*PROMPT, *alone(runner, Ask(PROMPT, greedy()))]
    runner.drafter = ScriptedDrafter({0: truth}, tiny.VOCAB, "random")
    steps, recorder = Steps(runner), Recorder()
    monkeypatch.setattr(runner.model, "processors_for", lambda params: ((recorder,), ()))
    num_known, drafts = len(PROMPT), ()
    for step in range(12):
        recorder.seen.clear()
        first = step == 0
        plan = [RowStep(0, 9 if first else 5, DraftRequest(3), tuple(range(8)) if first else ())]
        [row] = steps.run(plan, (join(0),) if first else ()).rows
        # The first position's history is every known token; each further one has one more draft.
        assert recorder.seen == [(*truth[:num_known], *drafts[:i]) for i in range(len(drafts) + 1)]
        num_known += len(row.tokens)
        drafts = row.drafts


def test_a_head_that_is_always_right_takes_fewer_steps(folders: dict[str, Path]) -> None:
    runner = open_runner(folders["qwen3_5"], head=True, kernels=True)
    ask = Ask(PROMPT, greedy(draft=3))
    wanted = alone(runner, ask)
    counts = {}
    for mode in ("right", "wrong"):
        runner.drafter = ScriptedDrafter({0: [*PROMPT, *wanted]}, tiny.VOCAB, mode)
        traffic = Traffic(runner, EngineConfig(max_streams=4))
        assert traffic.run([ask]) == [wanted]
        counts[mode] = traffic.finished["0"].stats.steps  # type: ignore[union-attr]
    assert counts["wrong"] == len(wanted)
    assert counts["right"] == 1 + -(-(len(wanted) - 1) // 4)


@pytest.mark.parametrize("library", LIBRARIES)
def test_p_min_cuts_each_row_for_itself(folders: dict[str, Path], library: str) -> None:
    runner = open_host(folders["llama-gqa-tied"], library)
    steps = Steps(runner)
    joins = (join(0), join(1, params=greedy(p_min=1.0)))
    rows = [RowStep(0, 9, DraftRequest(3), (0, 1, 2)), RowStep(1, 9, DraftRequest(3), (3, 4, 5))]
    assert [len(row.drafts) for row in steps.run(rows, joins).rows] == [3, 0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_thresholds_end_each_chain_where_its_confidence_falls_below(folders: dict[str, Path], library: str) -> None:
    """Against the same chains uncut: the threshold is for the product of confidences, and drafts do not change."""
    runner = open_host(folders["llama-gqa-tied"], library)
    joins = (join(0), join(1, params=greedy(temperature=1.0, seed=5)), join(2, PROMPT[::-1]))
    blocks = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    steps = Steps(runner)
    whole = steps.run([RowStep(i, 9, DraftRequest(4, report_confidence=True), blocks[i]) for i in range(3)], joins).rows
    assert [len(row.confidences) for row in whole] == [4, 4, 4]
    chains = [torch.tensor(row.confidences, dtype=torch.float64).cumprod(0).tolist() for row in whole]
    for lengths in ((2, 0, 4), (0, 0, 0), (1, 3, 0)):
        # Halfway between two values of the chain, so that no rounding decides.
        thresholds = [(([1.0, *c][n] + [*c, 0.0][n]) / 2) for c, n in zip(chains, lengths, strict=True)]
        cut = steps.run(
            [RowStep(i, 9, DraftRequest(4, thresholds[i]), blocks[i]) for i in range(3)], joins, leaves=(0, 1, 2)
        ).rows
        assert [row.drafts for row in cut] == [row.drafts[:n] for row, n in zip(whole, lengths, strict=True)]
        # The one that fell below the threshold is reported as well.
        reported = [row.confidences[: n + 1] for row, n in zip(whole, lengths, strict=True)]
        assert [row.confidences for row in cut] == [pytest.approx(each, abs=1e-6) for each in reported]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_draft_too_unsure_to_go_on_from_is_kept_and_is_the_last(folders: dict[str, Path], library: str) -> None:
    runner = open_host(folders["llama-gqa-tied"], library)
    steps = Steps(runner)
    [whole] = steps.run([RowStep(0, 9, DraftRequest(4, report_confidence=True), (0, 1, 2))], (join(0),)).rows
    chain = torch.tensor(whole.confidences, dtype=torch.float64).cumprod(0).tolist()
    [row] = steps.run(
        [RowStep(0, 9, DraftRequest(4, 0.0, (chain[1] + chain[2]) / 2), (0, 1, 2))], (join(0),), leaves=(0,)
    ).rows
    assert row.drafts == whole.drafts[:3]
    assert row.confidences == whole.confidences[:3]


@pytest.mark.parametrize("library", LIBRARIES)
def test_confidences_are_reported_only_where_they_are_asked_for(folders: dict[str, Path], library: str) -> None:
    runner = open_host(folders["llama-gqa-tied"], library)
    [row] = Steps(runner).run([RowStep(0, 9, DraftRequest(3), (0, 1, 2))], (join(0),)).rows
    assert len(row.drafts) == 3
    assert row.confidences == ()


@pytest.mark.parametrize("library", LIBRARIES)
def test_passes_end_when_every_row_has_ended(folders: dict[str, Path], library: str) -> None:
    runner = open_host(folders["llama-gqa-tied"], library)
    assert runner.info.stops_early
    passes = []
    drafter = runner.drafter
    assert isinstance(drafter, MtpDrafter)
    logits = drafter._head.logits

    def count(hidden: Any) -> Any:
        passes.append(hidden.shape[0])
        return logits(hidden)

    drafter._head.logits = count  # type: ignore[method-assign]
    joins = (join(0), join(1))
    Steps(runner).run(
        [
            RowStep(0, 9, DraftRequest(4, 1.0), (0, 1, 2)),
            RowStep(1, 9, DraftRequest(2, report_confidence=True), (3, 4, 5)),
        ],
        joins,
    )
    assert passes == [2, 1]
