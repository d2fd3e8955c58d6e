"""What rows keep for others on MLX: blocks in a store of their own, copied out of the dense buffers and into them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

import mlx.core as mx
import tiny
from mlx_tiny import open_mlx

from slipstream.engine.contract import EMPTY, DraftRequest, Keep, RowJoin, RowResult, RowStep, Start, StepPlan
from slipstream.runners.mlx import block_store
from slipstream.runners.mlx.block_store import BlockStore
from slipstream.runners.mlx.caches import FeedHolder, KvCache
from slipstream.runners.mlx.loading import MlxRunner
from slipstream.sampling import SamplingParams

SIZE = 4  # tokens of a block
LENGTH = 24


def make_cache(num_rows: int = 3) -> KvCache:
    """Rows of different numbers. [rows, 2, LENGTH, 8]"""
    cache = KvCache(FeedHolder(), num_rows, LENGTH)
    for row in range(num_rows):
        keys, values = (mx.random.normal((1, 2, LENGTH, 8), key=mx.random.key(2 * row + i)) for i in (0, 1))
        cache.write_row(row, keys, values)
    return cache


def tokens_of(cache: KvCache, row: int, num_tokens: int) -> list[object]:
    both = cache.read_row(row, 0, num_tokens)
    assert both is not None
    return [array.tolist() for array in both]


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KvCache]:
    """Small segments: a row's blocks lie in several."""
    monkeypatch.setattr(block_store, "SEGMENT", 4)
    return [make_cache(), make_cache()]


def test_scattered_blocks_come_back_in_their_order(caches: list[KvCache]) -> None:
    store, blocks = BlockStore(caches, 14, SIZE), [9, 2, 13, 3, 0]
    before = [tokens_of(cache, 0, 20) for cache in caches]
    assert before != [tokens_of(cache, 1, 20) for cache in caches]
    store.join(0, ())
    store.grow(0, blocks)
    store.save(0, 0, 8)
    store.save(0, 0, 20)
    store.leave(0)
    store.join(1, blocks)
    store.load(1, 1)
    assert [tokens_of(cache, 1, 20) for cache in caches] == before


def test_only_blocks_that_are_not_there_yet_are_copied(caches: list[KvCache]) -> None:
    """A row that started from the cache never writes the blocks it shares, whatever its buffer holds."""
    store = BlockStore(caches, 14, SIZE)
    before = [tokens_of(cache, 0, 8) for cache in caches]
    store.join(0, ())
    store.grow(0, (5, 6))
    store.save(0, 0, 8)
    store.join(1, (5, 6))  # its row of the buffers is not loaded: saving it would show
    store.grow(1, (7,))
    store.save(1, 1, 12)
    after = [tokens_of(cache, 1, 12) for cache in caches]
    store.join(2, (5, 6, 7))
    store.load(2, 2)
    assert [tokens_of(cache, 2, 8) for cache in caches] == before
    assert (
        [cache.read_row(2, 8, 12)[0].tolist() for cache in caches]
        == [  # type: ignore[index]
            [head[8:12] for head in keys] for keys, _ in after
        ]
    )


def test_a_block_given_to_another_row_is_overwritten(caches: list[KvCache]) -> None:
    store = BlockStore(caches, 14, SIZE)
    for row in (0, 1):
        store.join(row, ())
        store.grow(row, (3,))
        store.save(row, row, 4)
        store.leave(row)
    store.join(2, (3,))
    store.load(2, 2)
    assert tokens_of(caches[0], 2, 4) == tokens_of(caches[0], 1, 4)


def test_a_fork_keeps_what_its_parent_did_not(caches: list[KvCache]) -> None:
    """Parent and child have the same blocks; neither was kept when they parted."""
    store = BlockStore(caches, 14, SIZE)
    store.join(0, ())
    store.grow(0, (1, 2))
    store.fork(0, 1, (1, 2))
    store.save(1, 1, 8)
    store.leave(0)
    store.join(2, (1, 2))
    store.load(2, 2)
    assert tokens_of(caches[0], 2, 8) == tokens_of(caches[0], 1, 8)


def test_memory_is_taken_as_blocks_come_into_use(caches: list[KvCache]) -> None:
    store = BlockStore(caches, 14, SIZE)
    assert store.num_bytes == 0
    store.join(0, ())
    store.grow(0, (12, 13))
    store.save(0, 0, 8)  # the last segment is short: it has two blocks
    block = 2 * 2 * SIZE * 8 * 4  # keys and values, heads, tokens, dim, bytes
    assert store.num_bytes == len(caches) * 2 * block


def test_keeping_a_block_copies_nothing_else() -> None:
    """Neither the segment that it is written to, nor the buffer that is written next."""
    cache = KvCache(FeedHolder(), 1, 2048)
    cache.write_row(0, *(mx.ones((1, 2, 2048, 32)) for _ in range(2)))
    store = BlockStore([cache], 64, 32)
    store.join(0, ())
    store.grow(0, tuple(range(64)))
    one_token = [mx.ones((1, 2, 1, 32)) for _ in range(2)]
    mx.eval(cache.arrays(), one_token)
    store.save(0, 0, 32)
    large = cache.arrays()[0].nbytes
    assert store.num_bytes == 2 * large
    taken = []
    for step in range(2, 6):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        store.save(0, 0, 32 * step)
        cache.write_row(0, *one_token)
        mx.eval(cache.arrays())
        taken.append(mx.get_peak_memory() - before)
    assert max(taken) < large // 4


# On a runner.

PROMPT = tuple(3 * i % 89 for i in range(45))
OTHER = tuple(5 * i % 83 + 1 for i in range(37))
GREEDY = SamplingParams(temperature=0.0)


def step(
    runner: MlxRunner,
    number: int,
    joins: Sequence[tuple[int, tuple[int, ...], Start]],
    rows: Sequence[RowStep],
    leaves: tuple[int, ...] = (),
) -> tuple[RowResult, ...]:
    joining = tuple(RowJoin(slot, tokens, len(tokens), GREEDY, 0, 0.0, start=start) for slot, tokens, start in joins)
    runner.submit(StepPlan(number, leaves, joining, tuple(rows)))
    return runner.collect().rows


def rows_of(runner: MlxRunner, row: int, num_tokens: int) -> list[object]:
    """Keys and values in all layers, the head's last."""
    return [tokens_of(cache, row, num_tokens) for cache in runner.model.all_caches if isinstance(cache, KvCache)]


@pytest.mark.parametrize("drafts_at_once", [True, False])
@pytest.mark.parametrize("position", [24, 40])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3_5"])
def test_a_row_goes_on_as_the_one_that_kept_it_would(
    tmp_path: Path, kind: str, position: int, drafts_at_once: bool
) -> None:
    """Same keys and values, the head's included, same token, same drafts. Meanwhile others have used the buffers."""
    runner = open_mlx(tiny.save(tiny.build(kind), tmp_path, head=True))
    states = {24: 5, 40: 6} if runner.info.num_states else {24: None, 40: None}
    keeps = tuple(Keep(at, state) for at, state in states.items())
    drafts = DraftRequest(3) if drafts_at_once else DraftRequest()
    feeds = [
        RowStep(0, 45, drafts, blocks=(9, 2, 70, 71, 1, 8), keeps=keeps),
        RowStep(1, 37, DraftRequest(3), blocks=(20, 21, 22, 23, 24)),
    ]
    [cold, _] = step(runner, 0, [(0, PROMPT, EMPTY), (1, OTHER, EMPTY)], feeds)
    if not drafts_at_once:  # another runner drafts there
        fresh = open_mlx(tmp_path)
        [cold] = step(fresh, 0, [(0, PROMPT, EMPTY)], [RowStep(0, 45, DraftRequest(3), blocks=(0, 1, 2, 3, 4, 5))])
        before = rows_of(fresh, 0, 45)
    else:
        before = rows_of(runner, 0, 45)
    assert cold.drafts
    # The row that kept it leaves, and its blocks but the kept ones go to a row that keeps something else.
    other = Keep(16, 7 if runner.info.num_states else None)
    step(runner, 1, [(2, OTHER, EMPTY)], [RowStep(2, 30, blocks=(8, 30, 31, 32), keeps=(other,))], leaves=(0,))
    step(runner, 2, [], [RowStep(2, 7, blocks=(33,)), RowStep(1, 4)])
    start = Start(position, (9, 2, 70, 71, 1)[: position // 8], None, states[position])
    [warm] = step(runner, 3, [(3, PROMPT, start)], [RowStep(3, 45 - position, DraftRequest(3), blocks=(40, 41, 42))])
    assert (warm.tokens, warm.drafts) == (cold.tokens, cold.drafts)
    assert rows_of(runner, 2, 45) == before


def test_a_state_is_kept_among_replayed_drafts(tmp_path: Path) -> None:
    """The position lies before the step's own tokens: among drafts that were accepted in the step before."""
    runner = open_mlx(tiny.save(tiny.build("qwen3_5"), tmp_path, head=True))
    hot = SamplingParams(temperature=4.0)  # the noise decides, which the head knows: many drafts are accepted
    found = False
    for seed in range(20):
        prompt = PROMPT[:22]
        join = RowJoin(0, prompt, len(prompt), hot, seed, 0.0)
        runner.submit(StepPlan(0, (), (join,), (RowStep(0, 22, DraftRequest(4), blocks=tuple(range(8))),)))
        known = [*prompt, *runner.collect().rows[0].tokens]
        runner.submit(StepPlan(1, (), (), (RowStep(0, 5, DraftRequest(4)),)))
        known += runner.collect().rows[0].tokens
        row = runner.rows[0]
        if row.num_replay and row.cursor - row.num_replay < 24 < row.cursor:
            found = True
            runner.submit(StepPlan(2, (), (), (RowStep(0, 5, DraftRequest(4), keeps=(Keep(24, 5),)),)))
            want = runner.collect().rows[0]
            start = Start(24, (0, 1, 2), None, 5)
            again = RowJoin(1, tuple(known), len(prompt), hot, seed, 0.0, start=start)
            rows = (RowStep(1, len(known) - 24, DraftRequest(4), blocks=(10, 11, 12)),)
            runner.submit(StepPlan(3, (), (again,), rows))
            got = runner.collect().rows[0]
            assert got.tokens[0] == want.tokens[0]
            assert rows_of(runner, 1, len(known)) == rows_of(runner, 0, len(known))
            runner.submit(StepPlan(4, (1,), (), ()))
            runner.collect()
        runner.submit(StepPlan(5, (0,), (), ()))
        runner.collect()
    assert found
