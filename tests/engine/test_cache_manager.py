"""The cache manager on its own: admission, growth, shared starts, and blocks that all come back."""

from __future__ import annotations

import pytest

from slipstream.cache.manager import CachedRow, CacheManager, RowDemand
from slipstream.engine.contract import EMPTY, Start


def test_a_row_grows_and_its_blocks_are_sent_once() -> None:
    cache = CacheManager(8, 4)
    cache.admit(RowDemand("a", 9))
    assert cache.start("a") is EMPTY
    assert cache.take_unsent("a") == (0, 1, 2)
    assert cache.take_unsent("a") == ()
    assert cache.reserve("a", 12)
    assert cache.take_unsent("a") == ()
    assert cache.reserve("a", 13)
    assert cache.take_unsent("a") == (3,)
    cache.check_integrity("a")
    cache.release("a")
    cache.check_integrity(())
    assert (cache.num_free, cache.num_used) == (8, 0)


def test_a_demand_that_does_not_fit_changes_nothing() -> None:
    cache = CacheManager(4, 4)
    demands = [RowDemand("a", 8), RowDemand("b", 8)]
    assert cache.can_admit(demands, 0)
    assert not cache.can_admit(demands, 1)  # a running row may need a block soon
    cache.admit(demands[0])
    assert not cache.reserve("a", 17)
    assert cache.num_free == 2


def test_drafts_take_only_free_blocks() -> None:
    cache = CacheManager(3, 2)
    cache.admit(RowDemand("a", 4))
    assert cache.reserve_drafts("a", 4, 1) == 1  # the first draft is written when it is verified
    assert cache.num_free == 1
    assert cache.reserve_drafts("a", 4, 5) == 3
    assert cache.num_free == 0


@pytest.mark.parametrize(
    ("num_computed", "start"),
    [
        (8, Start(8, (0, 1), None, 7)),
        (9, Start(9, (0, 1, 3), (2, 3), 7)),
    ],
)
def test_a_child_shares_full_blocks_and_copies_the_last(num_computed: int, start: Start) -> None:
    cache = CacheManager(8, 4)
    cache.admit(RowDemand("parent", 12))
    demand = RowDemand("child", 12, num_shared=num_computed)
    assert cache.can_admit([demand], 4)
    cache.admit(demand)
    assert cache.num_used == 4
    assert cache.start("child", CachedRow("parent", 7, num_computed)) == start
    assert cache.take_unsent("child") == (() if start.copied else (3,))
    cache.check_integrity(("parent", "child"))
    cache.release("parent")
    assert cache.num_used == 3
    cache.check_integrity(["child"])
    cache.release("child")
    assert cache.num_used == 0


def test_a_successor_gets_the_blocks_it_would_have_shared() -> None:
    cache = CacheManager(4, 4)
    cache.admit(RowDemand("parent", 12))
    cache.admit(RowDemand("child", 12, num_shared=9))
    assert cache.num_free == 0
    cache.release("parent")
    cache.stop_sharing("child")
    assert cache.start("child") is EMPTY
    assert len(cache.take_unsent("child")) == 3
    cache.check_integrity(["child"])


def test_rows_that_nobody_runs_are_found() -> None:
    cache = CacheManager(4, 4)
    cache.admit(RowDemand("a", 4))
    with pytest.raises(AssertionError):
        cache.check_integrity(())
