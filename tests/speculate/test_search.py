"""The search for depths: the order of candidates, and the best prefix by hand."""

from __future__ import annotations

import pytest

from slipstream.speculate.search import Candidate, Choice, Costs, Offset, by_chance, search


def candidate(chance: float, depth: int, row: int) -> Candidate:
    return Candidate(chance, depth, row, proposed=1.0, in_pass=1.0)


def test_the_likeliest_come_first_and_of_equal_ones_the_less_deep() -> None:
    first = [candidate(0.5, 1, 0), candidate(0.9, 1, 1), candidate(0.5, 1, 2)]
    second = [candidate(0.2, 2, 0), candidate(0.5, 2, 1)]
    found = [(each.depth, each.row) for each in by_chance([first, second])]
    assert found == [(1, 1), (1, 0), (1, 2), (2, 1), (2, 0)]


@pytest.mark.parametrize(
    ("pass_seconds", "depths", "tokens"),
    [
        (0.1, [2, 0], 3.3),  # both drafts of the first row, none of the second
        (0.5, [1, 0], 2.8),  # a second pass does not pay for one draft
        (2.0, [0, 0], 2.0),
    ],
)
def test_the_best_prefix_by_rate(pass_seconds: float, depths: list[int], tokens: float) -> None:
    candidates = by_chance([[candidate(0.8, 1, 0), candidate(0.01, 1, 1)], [candidate(0.5, 2, 0)]])
    costs = Costs([2.0 + 0.1 * n for n in range(4)], [0.0, pass_seconds, pass_seconds])
    plain = Choice([0, 0], 2.0, 0.0, 2.0, 2.0)
    choice = search(candidates, costs, plain, min_gain=1.01)
    assert choice.depths == depths
    assert choice.tokens == pytest.approx(tokens)


def test_with_an_offset_the_gain_per_added_second_counts() -> None:
    candidates = by_chance([[candidate(0.9, 1, 0), candidate(0.3, 1, 1)]])
    costs = Costs([10.0, 10.1, 10.2], [0.0, 0.1, 0.1])
    plain = Choice([0, 0], 2.0, 0.0, 10.0, 10.0)
    assert search(candidates, costs, plain, 1.01).depths == [1, 1]
    # One draft: 0.9 tokens in 0.2 s; both: 1.2 in 0.3.
    assert search(candidates, costs, plain, 1.01, Offset(2.0, 10.0)).depths == [1, 0]
