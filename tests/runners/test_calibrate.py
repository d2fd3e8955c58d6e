"""The order in which sizes are timed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

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
