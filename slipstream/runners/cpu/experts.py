"""Routed experts in C: all experts of a step in one job, each token's sum in the order of its own routing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.cpu.packed import PackedWeight
from slipstream.runners.torch.experts import Addends

MAX_ACTIVE = 64  # as in moe.h


class _MoeLayer(ctypes.Structure):
    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("num_active", ctypes.c_int32),
    )


class PackedExperts:
    """An expert's matrices: gate and up [2 inner, hidden], down [hidden, inner]."""

    def __init__(self, kernels: Kernels, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]) -> None:
        assert len(gate_up) == len(down) > 0
        assert all(up.rows == 2 * one.cols and up.cols == one.rows for up, one in zip(gate_up, down, strict=True))
        self.kernels = kernels
        self._kept = (tuple(gate_up), tuple(down))
        self.hidden, self.inner = down[0].rows, down[0].cols
        self._tables = [_addresses(each) for each in self._kept]  # int64 [experts]
        self._structs: dict[int, _MoeLayer] = {}  # by number of active experts: a layer has one

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for each in self._kept for weight in each)

    def address(self, num_active: int) -> int:
        """Of the C struct."""
        if num_active not in self._structs:
            count = len(self._kept[0])
            assert num_active <= min(MAX_ACTIVE, count)
            pointers = (table.data_ptr() for table in self._tables)
            self._structs[num_active] = _MoeLayer(*pointers, count, num_active)
        return ctypes.addressof(self._structs[num_active])

    def __call__(self, x: Tensor, scores: Tensor, num_active: int, addends: Addends, batch: Any) -> Tensor:
        gated = torch.cat([scores, addends.shared_gate], dim=1)
        return self.kernels.moe(self.address(num_active), x, gated, addends.shared, addends.residual)


def _addresses(weights: Sequence[PackedWeight]) -> Tensor:
    return torch.tensor([weight.address for weight in weights], dtype=torch.int64)
