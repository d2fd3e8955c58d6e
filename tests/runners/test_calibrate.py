"""The order in which sizes are timed, and what is made of their seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import make_info

from slipstream.runners.host import calibrate


class Recorded:
    """Sizes whose tasks write themselves down."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.done: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.sizes))

    def tasks(self, n: int) -> Iterator[tuple[tuple[str, int], partial[None]]]:
        yield ("verify", n), partial(self.done.append, n)


def timed(sizes: Recorded, seconds: float = calibrate.SECONDS) -> set[tuple[str, int]]:
    return set(calibrate._timed_rounds(sizes, seconds))  # type: ignore[arg-type]


def test_small_work_is_timed_before_large_and_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SETTLING", 0.0)
    sizes = Recorded(64, 1, 8)
    assert timed(sizes) == {("verify", n) for n in (1, 8, 64)}
    assert sizes.done == [1, 8, 64] * (calibrate.ROUNDS + 1)
    sizes.done.clear()
    monkeypatch.setattr(calibrate, "SETTLING", 0.001)
    timed(sizes)
    starts = [i for i, n in enumerate(sizes.done) if i and sizes.done[i - 1] == 64]
    assert len(starts) == calibrate.ROUNDS
    assert all(sizes.done[i : i + 2] == [1, 1] for i in starts)  # one of them, at least, was not timed


def test_without_time_two_sizes_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SETTLING", 0.0)
    sizes = Recorded(64, 1, 8, 256)
    assert timed(sizes, 0.0) == {("verify", 1), ("verify", 8)}
    assert sizes.done == [1, 8]


def test_what_a_long_context_adds_to_a_piece_and_to_each_of_its_tokens() -> None:
    info = make_info(max_context=4096)
    of_piece, of_token, long = 3e-6, 2e-7, calibrate.LONG_CONTEXT
    seconds = {("read", n): 0.001 * n for n in calibrate.READ_SIZES}
    seconds |= {("read, long", n): 0.001 * n + long * (of_piece + of_token * n) for n in (8, 64)}
    assert calibrate._read_context(info, seconds) == pytest.approx((of_piece, of_token))
    del seconds["read, long", 64]  # there was no time for it
    assert calibrate._read_context(info, seconds) == (0.0, 0.0)
    seconds["read, long", 64] = 0.0  # a hiccup before
    assert calibrate._read_context(info, seconds) == (pytest.approx(of_piece + 8 * of_token), 0.0)


class Fed:
    """A target model that computes nothing and writes down what it was fed; its head does the same."""

    max_depth = 3

    def __init__(self) -> None:
        self.by_target: list[Sequence[int]] = []
        self.by_head: list[Sequence[int]] = []

    def __getattr__(self, name: str) -> Any:
        return Mock()

    def forward(self, tokens: Sequence[int], batch: object) -> Mock:
        self.by_target.append(tokens)
        return Mock()

    def committed(self, step: calibrate.CommittedStep[Any, Any]) -> None:
        self.by_head.append([token for row in step.rows for token in row.next_tokens])


def test_tokens_are_unlike_so_that_a_sparse_model_reads_as_many_experts_as_for_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "SETTLING", 0.0)
    fed, info = Fed(), make_info(vocab_size=100_000, num_slots=8, max_context=4096)
    costs = calibrate.measure(info, fed, fed, (1, 8, 32), (1, 8))  # type: ignore[arg-type]
    assert len(costs.verify) == 3
    for steps in (fed.by_target, fed.by_head):
        assert max(map(len, steps)) == calibrate.READ_SIZES[-1]
        assert all(len(set(tokens)) > 0.9 * len(tokens) for tokens in steps)
    assert len({tuple(tokens) for tokens in fed.by_target}) > len(fed.by_target) / 2  # others each time
