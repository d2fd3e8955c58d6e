"""How many drafts are accepted, for every host-driven runner."""

from __future__ import annotations

import pytest

from slipstream.runners.host.accept import accept_all
from slipstream.runners.host.rows import GREEDY, Row, SamplingRows, Verdict
from slipstream.runners.rows import RowSpan


def sampling_rows(*drafts: list[int]) -> SamplingRows:
    rows = [Row(slot, [1], GREEDY, drafts=own) for slot, own in enumerate(drafts)]
    return SamplingRows(list(range(len(rows))), rows, [RowSpan(row.slot, 0, 0, 1, len(row.drafts)) for row in rows])


@pytest.mark.parametrize(
    ("sampled", "drafts", "accepted"),
    [([4, 5, 6], [4, 5], 2), ([4, 5, 6], [4, 9], 1), ([4, 5, 6], [9, 5], 0), ([4], [], 0)],
)
def test_drafts_are_accepted_while_they_equal_the_sample(sampled: list[int], drafts: list[int], accepted: int) -> None:
    verdicts = accept_all(sampling_rows(drafts, []), [*sampled, 7], None, None)
    assert verdicts == [Verdict(accepted, sampled[accepted]), Verdict(0, 7)]


def test_a_mask_that_cannot_be_followed_limits_acceptance() -> None:
    rows = sampling_rows([4, 5], [8])
    assert accept_all(rows, [4, 5, 6, 8, 9], [1, 1], None) == [Verdict(1, 5), Verdict(1, 9)]
