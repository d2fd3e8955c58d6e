"""The constrained rows of a runner whose rows live on the device: their matchers on the host, and a step's masks.

A matcher moves by the reports of steps. So a step with constrained samples needs the reports of all steps before it;
its forward runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.runners.cuda.host_rows import HostRow, RowFeed
from slipstream.runners.masks import StepMasks
from slipstream.sampling.masks import num_bytes

UNLIMITED = 1 << 20  # more drafts than a row can have


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
        self.faults: dict[int, str] = {}  # rows that cannot go on, and why

    def sample_masks(self) -> StepMasks:
        """Waits for the steps before: the forward runs meanwhile."""
        self._read_reports()
        masks = StepMasks([], [], [])
        for i, (row, feed, first) in enumerate(zip(self._rows, self._feeds, self._first_samples, strict=True)):
            state = row.constraint
            if state is None or first < 0:
                masks.most.append(UNLIMITED)
                continue
            masks.add(first, state.masks(feed.num_drafts))
            if state.fault:
                self.faults[i] = state.fault
        return masks


class MaskBuffers:
    """Device memory that never moves: captured steps read it."""

    def __init__(self, num_samples: int, max_rows: int, max_depth: int, vocab_size: int, device: torch.device) -> None:
        self.masks = torch.zeros(max_rows * (1 + max_depth), num_bytes(vocab_size), dtype=torch.uint8, device=device)
        self.index = torch.full((num_samples,), -1, dtype=torch.int32, device=device)  # the mask of each; -1: none
        self.max_accepted = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def upload(self, step: StepMasks, num_samples: int) -> None:
        index = np.full(num_samples, -1, np.int32)
        index[step.at] = np.arange(len(step.at))
        _put(self.index, index)
        _put(self.max_accepted, np.array(step.most, np.int32))
        if step.masks:
            packed = np.frombuffer(b"".join(step.masks), np.uint8).reshape(len(step.masks), -1)
            _put(self.masks, packed.copy())  # torch wants writable memory


def _put(target: Tensor, values: np.ndarray) -> None:
    host = torch.from_numpy(values)
    if target.device.type == "cuda":
        host = host.pin_memory()
    target[: len(values)].copy_(host, non_blocking=True)
