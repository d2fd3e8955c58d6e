"""The constrained rows of a runner whose rows live on the device: what the host follows of them, and their masks.

A matcher moves by what the reports tell. So a step with constrained draws has to know the reports of all steps before
it; its forward runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.contract import RowJoin, RowStep
from slipstream.errors import ConstraintFault
from slipstream.runners.masks import StepMasks
from slipstream.runners.rows import matcher_of
from slipstream.sampling.constraints import Matcher
from slipstream.sampling.masks import num_bytes


@dataclass(slots=True)
class _Followed:
    matcher: Matcher
    drafts: tuple[int, ...] = ()  # the newest ones told
    fault: str = ""


ALL = 1 << 20  # more drafts than a row can have


class MaskBuffers:
    """Device memory that never moves: captured steps read it."""

    def __init__(self, num_draws: int, max_rows: int, max_depth: int, vocab_size: int, device: torch.device) -> None:
        self.masks = torch.zeros(max_rows * (1 + max_depth), num_bytes(vocab_size), dtype=torch.uint8, device=device)
        self.index = torch.full((num_draws,), -1, dtype=torch.int32, device=device)
        self.most = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def upload(self, step: StepMasks, num_draws: int) -> None:
        index = np.full(num_draws, -1, np.int32)  # which mask each draw has; -1: none
        index[step.at] = np.arange(len(step.at))
        _put(self.index, index)
        _put(self.most, np.array(step.most, np.int32))
        if step.masks:
            packed = np.frombuffer(b"".join(step.masks), np.uint8).reshape(len(step.masks), -1)
            _put(self.masks, packed.copy())  # what torch is given has to be writable


class ConstrainedRows:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Followed] = {}  # by slot

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, join: RowJoin) -> None:
        matcher = matcher_of(join, self._vocab_size)
        if matcher is not None:
            self._rows[join.slot] = _Followed(matcher)

    def leave(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def any_of(self, steps: Sequence[RowStep], first_draws: Sequence[int]) -> bool:
        """Whether a constrained row draws in this step."""
        return bool(self._rows) and any(
            s.slot in self._rows and d >= 0 for s, d in zip(steps, first_draws, strict=True)
        )

    def learn(self, slot: int, tokens: Sequence[int], drafts: tuple[int, ...]) -> None:
        if followed := self._rows.get(slot):
            followed.matcher.advance(tokens)
            followed.drafts = drafts

    def step(
        self, steps: Sequence[RowStep], gaps: Sequence[int], first_draws: Sequence[int]
    ) -> tuple[StepMasks, dict[int, str]]:
        """Masks, and the rows that cannot go on. ``first_draws``: of each row among the step's draws, or -1."""
        found, faults = StepMasks([], [], []), {}
        for row, (step, gap, first) in enumerate(zip(steps, gaps, first_draws, strict=True)):
            followed = self._rows.get(step.slot)
            if followed is None or first < 0:
                found.most.append(ALL)
                continue
            found.add(first, _masks(followed, step.feed - gap))
            if followed.fault:
                faults[row] = followed.fault
        return found, faults


def _masks(followed: _Followed, num_drafts: int) -> list[bytes | None]:
    try:
        return followed.matcher.masks(followed.drafts[:num_drafts])
    except ConstraintFault as fault:
        followed.fault = str(fault)
        return []


def _put(place: Tensor, values: np.ndarray) -> None:
    host = torch.from_numpy(values)
    if place.device.type == "cuda":
        host = host.pin_memory()
    place[: len(values)].copy_(host, non_blocking=True)
