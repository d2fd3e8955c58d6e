"""The block pool's integrity check, and what the configuration refuses."""

from __future__ import annotations

import pytest

from slipstream.cache.blocks import BlockPool
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError


def test_blocks_go_out_and_come_back() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(3)
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.check_integrity(held)
    pool.release(held)
    pool.check_integrity([])


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_count_for(num_tokens: int) -> None:
    assert BlockPool(4, 16).count_for(num_tokens) == (num_tokens + 15) // 16


def test_a_lost_block_is_found() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check_integrity(held[:1])


def test_a_shared_block_is_free_when_the_last_lets_go() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(2)
    pool.share(held[:1])
    pool.check_integrity([*held, held[0]])
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check_integrity(held)
    pool.release(held)
    assert pool.num_free == 3
    pool.release(held[:1])
    pool.check_integrity([])
    with pytest.raises(AssertionError, match="a free block was shared"):
        pool.share(held)


def test_a_double_free_is_found() -> None:
    pool = BlockPool(2, 16)
    held = pool.allocate(2)
    pool.release(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(held)


def test_too_many_blocks_are_not_given() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2, 16).allocate(3)


@pytest.mark.parametrize(
    "options",
    [
        {"max_streams": 0},
        {"max_step_tokens": 10},
        {"max_depth": 99},
        {"draft": "sometimes"},
        {"draft": 99},
        {"p_min": 1.5},
        {"block_size": 0},
        {"max_streams": True},
        {"cache_host": -1},
        {"cache_disk": -1},
        {"cache_disk": 1.5},
        {"cache_dir": ""},
        {"prefix_cache": False, "cache_dir": "somewhere"},
        {"prefix_cache": False, "cache_host": 1},
    ],
)
def test_config_refuses(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**options)  # type: ignore[arg-type]
