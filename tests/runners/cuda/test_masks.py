"""Masks: the kernel against plain indexing, at vocabularies that fill no byte and no block. The host's part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.engine.contract import DraftRequest
from slipstream.runners.cuda.constrained import MAX_GUIDED_ROWS, UNLIMITED, StepConstraints
from slipstream.runners.cuda.host_rows import ConstraintState, HostRow, RowFeed
from slipstream.runners.cuda.kernels.sampling.masks import apply_masks
from slipstream.runners.cuda.report import RowReport
from slipstream.runners.logprobs import NO_LOGPROBS
from slipstream.sampling.masks import num_bytes, only


@pytest.mark.parametrize("vocab_size", [97, 4096, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_is_allowed_is_left(device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    allowed = [[0, 7, 8, vocab_size - 1], [vocab_size // 2]]
    packed = b"".join(only(tokens, vocab_size) for tokens in allowed)
    masks = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(2, num_bytes(vocab_size)).to(device)
    logits = torch.randn(5, vocab_size + 3, device=device).to(dtype)[:, :vocab_size]  # rows that lie apart
    index = torch.tensor([1, -1, 0, 0, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([2, 0, 1, -1, 0], dtype=torch.int32, device=device)  # the fourth is padding
    wanted = logits.clone()
    for position, which in ((0, 1), (2, 0), (4, 1)):
        lost = torch.ones(vocab_size, dtype=torch.bool, device=device)
        lost[allowed[which]] = False
        wanted[position, lost] = float("-inf")
    apply_masks(logits, slots, index, masks)
    assert torch.equal(logits, wanted)


class Counting:
    """A matcher that allows the token after the last one."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        if self.last is None:
            return [None] * (len(drafts) + 1)
        found: list[bytes | None] = [only([self.last + 1], 97)]
        for i, draft in enumerate(drafts):
            if draft != self.last + 1 + i:
                break
            found.append(only([draft + 1], 97))
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        raise AssertionError("no mask moves a matcher")


def row(slot: int, matcher: Counting | None, drafts: tuple[int, ...] = ()) -> HostRow:
    state = None if matcher is None else ConstraintState(matcher, drafts)
    return HostRow(slot, 1, 9, plain=True, may_draft=True, p_min=0.0, logprobs=NO_LOGPROBS, constraint=state)


def test_a_step_masks_its_samples_and_then_the_first_drafts() -> None:
    rows = [row(0, Counting(5), (6, 9)), row(1, None), row(2, Counting(None), (1, 2)), row(3, Counting(20))]
    depths = (2, 0, 0, 1)
    feeds = [RowFeed(i, 3, draft=DraftRequest(depth)) for i, depth in enumerate(depths)]
    read: list[bool] = []
    step = StepConstraints(rows, feeds, (0, 3, 6, 9), lambda: read.append(True))
    masks = step.sample_masks()
    assert read == [True]
    assert masks.at == [0, 1, 9]  # the second draft of the first row is not allowed
    assert masks.masks == [only([token], 97) for token in (6, 7, 21)]
    assert masks.max_accepted == [1, UNLIMITED, 2, 0]
    assert step.guides_drafts
    reports = [RowReport(3, tokens, (), ()) for tokens in ((6, 7), (1,), (1,), (21,))]
    drafts = step.draft_masks(reports, (0, 3), draft_vocab=97)
    assert (drafts.at, drafts.masks) == ([0, 1], [only([8], 97), only([22], 97)])
    # A head that does not know the only allowed token drafts anything.
    assert step.draft_masks(reports, (0, 3), draft_vocab=16).at == [0]


@pytest.mark.parametrize(
    ("num_guided", "num_free", "guides"),
    [
        (0, 2, False),
        (1, 0, True),
        (1, 1, True),
        (1, 2, False),
        (MAX_GUIDED_ROWS, 1, True),
        (MAX_GUIDED_ROWS + 1, 0, False),
    ],
)
def test_the_host_waits_for_few_rows_that_are_half_of_those_that_draft(
    num_guided: int, num_free: int, guides: bool
) -> None:
    rows = [row(i, Counting(5)) for i in range(num_guided)] + [row(99, Counting(None)) for _ in range(num_free)]
    feeds = [RowFeed(each.slot, 1, draft=DraftRequest(1)) for each in rows]
    step = StepConstraints(rows, feeds, range(len(rows)), lambda: None)
    step.sample_masks()
    assert step.guides_drafts == guides
