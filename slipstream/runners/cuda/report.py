"""A step's report: one array of int32 on the device, a row a row, and the host's reading of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowReport:
    num_fed: int
    tokens: tuple[int, ...]  # committed by the step
    drafts: tuple[int, ...]  # held after it
    confidences: tuple[float, ...]  # by draft pass, those after the drafts held too; beyond the row's last: anything


class StepReport:
    """Named columns of the array. Kernels get them as pointers, with the stride of a row."""

    def __init__(self, max_rows: int, depth: int, device: torch.device) -> None:
        self.depth = depth
        self._sizes = [1, 1, depth + 1, 1, depth, depth]
        self.values = torch.zeros(max_rows, sum(self._sizes), dtype=torch.int32, device=device)
        columns = self._columns(self.values)
        self.num_fed, self.num_tokens, self.tokens, self.num_drafts, self.drafts, self.confidences = columns

    @property
    def stride(self) -> int:
        return self.values.stride(0)

    def read(self, values: Tensor) -> list[RowReport]:
        """``values``: the first rows of the array, on the host."""
        columns = [column.tolist() for column in self._columns(values)]
        return [
            RowReport(num_fed, tuple(tokens[:num_tokens]), tuple(drafts[:num_drafts]), tuple(confidences))
            for (num_fed,), (num_tokens,), tokens, (num_drafts,), drafts, confidences in zip(*columns, strict=True)
        ]

    def _columns(self, values: Tensor) -> tuple[Tensor, ...]:
        *whole, confidences = values.split(self._sizes, dim=1)
        return *whole, confidences.view(torch.float32)
