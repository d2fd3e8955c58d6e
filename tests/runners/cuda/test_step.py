"""The bookkeeping of draft passes: where a row's drafts end, against the plain formula."""

from __future__ import annotations

import pytest
import torch

from slipstream.runners.cuda.kernels.step import RowState, draft_commit
from slipstream.runners.cuda.report import StepReport

DEPTH, SLOTS = 3, 12


@pytest.mark.parametrize("simulated", [False, True])
def test_drafts_end_before_the_first_unsure_one(device: torch.device, simulated: bool) -> None:
    rows = torch.tensor([4, 0, 5, 1, 3], dtype=torch.int32)  # of the step, in the order of the pass
    slots = torch.tensor([7, 2, 11, 0, 5], dtype=torch.int32)
    # The bounds, by row: each single draft's, the chain's, and the chain's for another draft.
    p_min = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.4])
    threshold = torch.tensor([0.0, 0.3, 0.0, 0.0, 0.3])
    go_on = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5])
    rates = torch.tensor([0.6, 0.7, 0.9])
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.7, 0.5, 0.8], [0.6, 0.6, 0.9], [0.1, 0.1, 0.1], [0.4, 0.9, 0.9]])
    expected = [1, 2, 2, 3, 1]
    if simulated:
        confidence, expected = rates.expand(5, DEPTH), [3, 3, 2, 3, 2]
    state = row_state(device)
    state.p_min[slots.long()] = p_min.to(device)
    bounds = torch.zeros(2, 8, device=device)
    bounds[:, rows.long()] = torch.stack([threshold, go_on]).to(device)
    report = StepReport(8, DEPTH, device)
    padded_rows, padded_slots = (torch.cat([part, torch.tensor([-1] * 3, dtype=torch.int32)]) for part in (rows, slots))
    given = torch.zeros(5, DEPTH) if simulated else confidence  # a simulated head's own are not looked at
    for ahead in range(DEPTH):
        column = torch.cat([given[:, ahead], torch.ones(3)]).to(device)
        drafts = torch.arange(8, dtype=torch.int32, device=device) + 10 * ahead
        samples = (padded_slots.to(device), drafts, column)
        given_rates = rates.to(device) if simulated else None
        draft_commit(state, padded_rows.to(device), bounds[0], bounds[1], *samples, report, given_rates, ahead)
    assert state.num_drafts[slots.long()].tolist() == expected
    assert state.num_drafts.sum() == sum(expected)
    assert torch.equal(report.confidences[rows.long()].cpu(), confidence)
    for i, slot in enumerate(slots.tolist()):
        assert state.tokens[slot, 3:].tolist() == [i, 10 + i, 20 + i, -1, -1]
    assert (state.tokens[:, :3] == -1).all()


def row_state(device: torch.device) -> RowState:
    """Slots with three known tokens each."""
    ints = torch.zeros(4, SLOTS, dtype=torch.int32, device=device)
    known, cursor, num_drafts, replay = ints.unbind()
    known += 3
    tokens = torch.full((SLOTS, 8), -1, dtype=torch.int32, device=device)
    seeds = torch.zeros(SLOTS, dtype=torch.int64, device=device)
    return RowState(tokens, known, cursor, num_drafts, replay, torch.zeros(SLOTS, device=device), seeds)
