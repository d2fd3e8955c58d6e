"""The order in which sizes are timed, and what is made of their seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
