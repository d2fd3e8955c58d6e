"""A machine whose speed changes while the cost model learns, mostly from plain steps."""

from __future__ import annotations

import pytest

from slipstream.engine.contract import StepCosts
from slipstream.speculate.cost_model import CostModel, Decoding, StepTiming

SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
PLAIN, DRAFTED = Decoding(8, 8), Decoding(12, 8)


def seconds(num_tokens: int) -> float:
    return 0.006 + 0.003 * num_tokens


def calibrated() -> CostModel:
    draft = tuple((rows, 0.001 + 0.0004 * rows) for rows in SIZES)
    return CostModel(StepCosts(tuple((n, seconds(n)) for n in SIZES), draft))


@pytest.mark.parametrize("slower", [1.7, 0.6])
def test_a_machine_that_changes_its_speed_while_nobody_drafts_changes_that_of_draft_passes(slower: float) -> None:
    """Else drafting looks cheap on a machine that other work slows down, and dear on one that has become fast."""
    costs = calibrated()
    before = costs.undisturbed(PLAIN), costs.drafting((8,), 0.0), costs.undisturbed(DRAFTED)
    for _ in range(2000):
        costs.observe(StepTiming(PLAIN, slower * seconds(8), 0.0))
    after = costs.undisturbed(PLAIN), costs.drafting((8,), 0.0), costs.undisturbed(DRAFTED)
    for old, new in zip(before, after):
        assert old is not None
        assert new == pytest.approx(slower * old, rel=0.02)  # also what was not seen: steps with drafts


def test_the_shape_is_still_learned_from_sizes_that_differ() -> None:
    costs = calibrated()
    for turn in range(4000):  # beside plain steps some with drafts, which are dearer than was measured at the start
        rows, factor = (DRAFTED, 1.3) if turn % 4 == 0 else (PLAIN, 1.0)
        costs.observe(StepTiming(rows, factor * seconds(rows.num_tokens), 0.0))
    ratio = costs.verify.curve.at(12) / costs.verify.curve.at(8)
    assert ratio == pytest.approx(1.3 * seconds(12) / seconds(8), rel=0.03)
