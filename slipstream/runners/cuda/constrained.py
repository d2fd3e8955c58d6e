"""The constrained rows of a runner whose rows live on the device: their matchers on the host, and a step's masks.

A matcher moves by the reports of steps. So a step with constrained samples needs the reports of all steps before it;
its forward runs meanwhile. And where such a row drafts, the host reads the step's own verdict and masks the row's first
draft; the head's feed runs meanwhile. Later drafts would need a wait each, with nothing to run (decision 10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.runners.cuda.host_rows import HostRow, RowFeed
from slipstream.runners.cuda.report import RowReport
from slipstream.runners.masks import StepMasks
from slipstream.sampling.masks import is_empty, num_bytes

UNLIMITED = 1 << 20  # more drafts than a row can have
MAX_GUIDED_ROWS = 8  # as many masks are computed while a head of a large model is fed


class StepConstraints:
    """The host's part in a step with constrained samples."""

    def __init__(
        self,
        rows: Sequence[HostRow],
        feeds: Sequence[RowFeed],
        first_samples: Sequence[int],
        read_reports: Callable[[], None],
    ) -> None:
        """``first_samples``: of each row among the step's samples, or -1. ``read_reports``: of the steps before."""
        self._rows = rows
        self._feeds = feeds
        self._first_samples = first_samples
        self._read_reports = read_reports
        self._guided: set[int] = set()  # rows whose next tokens are restricted, and that draft
        self.faults: dict[int, str] = {}  # rows that cannot go on, and why

    def sample_masks(self) -> StepMasks:
        """Waits for the steps before: the forward runs meanwhile."""
        self._read_reports()
        masks = StepMasks([], [], [])
        for i, (row, feed, first) in enumerate(zip(self._rows, self._feeds, self._first_samples, strict=True)):
            state = row.constraint
            if state is None or first < 0:
                masks.max_accepted.append(UNLIMITED)
                continue
            own = state.masks(feed.num_drafts)
            masks.add(first, own)
            if state.fault:
                self.faults[i] = state.fault
            elif feed.draft.depth and any(own):
                self._guided.add(i)
        return masks

    @property
    def guides_drafts(self) -> bool:
        """Whether the first drafts get masks. The wait holds up the whole batch: it is made for few rows, and only if
        they are half of those that draft. A row that nothing restricted in this step drafts without."""
        num_drafting = sum(feed.num_samples > 0 and feed.draft.depth > 0 for feed in self._feeds)
        return 0 < len(self._guided) <= MAX_GUIDED_ROWS and 2 * len(self._guided) >= num_drafting

    def draft_masks(self, reports: Sequence[RowReport], draft_rows: Sequence[int], draft_vocab: int) -> StepMasks:
        """Of the rows of the first draft pass, after the tokens that this step commits. A row that could then draft
        nothing has none: the head may not know the token."""
        masks = StepMasks([], [], [])
        for position, i in enumerate(draft_rows):
            state = self._rows[i].constraint
            if i not in self._guided or state is None:
                continue
            mask = state.mask_after(reports[i].tokens)
            if mask is not None and not is_empty(mask[: draft_vocab // 8]):
                masks.at.append(position)
                masks.masks.append(mask)
        return masks


class MaskBuffers:
    """Device memory that never moves: captured steps read it."""

    def __init__(self, num_samples: int, max_rows: int, max_depth: int, vocab_size: int, device: torch.device) -> None:
        self.masks = torch.zeros(max_rows * (1 + max_depth), num_bytes(vocab_size), dtype=torch.uint8, device=device)
        self.index = torch.full((num_samples,), -1, dtype=torch.int32, device=device)  # the mask of each; -1: none
        self.max_accepted = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def upload(self, step: StepMasks, num_samples: int) -> None:
        """Of a step's samples or of a draft pass. In stream order: whatever reads the last ones is launched before."""
        index = np.full(num_samples, -1, np.int32)
        index[step.at] = np.arange(len(step.at))
        _put(self.index, index)
        if step.max_accepted:
            _put(self.max_accepted, np.array(step.max_accepted, np.int32))
        if step.masks:
            packed = np.frombuffer(b"".join(step.masks), np.uint8).reshape(len(step.masks), -1)
            _put(self.masks, packed.copy())  # torch wants writable memory


def _put(target: Tensor, values: np.ndarray) -> None:
    host = torch.from_numpy(values)
    if target.device.type == "cuda":
        host = host.pin_memory()
    target[: len(values)].copy_(host, non_blocking=True)
