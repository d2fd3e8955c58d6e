"""The contents of each slot on the device: tokens, cursor, drafts, and the parameters of its sampling.

The host writes here when a stream joins; afterwards only kernels do, so the host need not know how far a row has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.contract import RowJoin
from slipstream.runners.cuda.kernels.step import RowState
from slipstream.runners.torch.sampling.noise import signed64
from slipstream.sampling.params import MAX_BIAS

_INTS = ("known", "cursor", "num_drafts", "replay", "num_prompt", "top_k", "num_bias", "greedy")
_FLOATS = ("inv_temperature", "p_min", "repetition", "presence", "frequency", "top_p", "min_p")


class DeviceRows:
    def __init__(self, num_slots: int, num_positions: int, blocks_per_slot: int, device: torch.device) -> None:
        self.device = device
        self.num_slots = num_slots
        self.tokens = torch.zeros(num_slots, num_positions, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_slots, blocks_per_slot, dtype=torch.int32, device=device)
        self._ints = torch.zeros(len(_INTS), num_slots, dtype=torch.int32, device=device)
        self._floats = torch.zeros(len(_FLOATS), num_slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.bias_tokens = torch.zeros(num_slots, MAX_BIAS, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(num_slots, MAX_BIAS, dtype=torch.float32, device=device)
        known, cursor, num_drafts, replay = (
            self.int_field(name) for name in ("known", "cursor", "num_drafts", "replay")
        )
        self.state = RowState(self.tokens, known, cursor, num_drafts, replay, self.float_field("p_min"), self.seeds)

    def int_field(self, name: str) -> Tensor:
        return self._ints[_INTS.index(name)]

    def float_field(self, name: str) -> Tensor:
        return self._floats[_FLOATS.index(name)]

    @property
    def noise(self) -> tuple[Tensor, Tensor, Tensor]:
        """By slot: inverse temperature, seed, whether it is greedy."""
        return self.float_field("inv_temperature"), self.seeds, self.int_field("greedy")

    def join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self.num_slots
        params, slot = join.params, join.slot
        cursor = join.start.num_computed
        self._write(self.tokens[slot], np.array(join.tokens, np.int32))
        sampling = (params.top_k, len(params.logit_bias), int(params.greedy))
        ints = (len(join.tokens), cursor, 0, 0, join.num_prompt, *sampling)
        self._write_column(self._ints, slot, torch.tensor(ints, dtype=torch.int32))
        floats = (
            params.inverse_temperature,
            join.p_min,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_p,
            params.min_p,
        )
        self._write_column(self._floats, slot, torch.tensor(floats, dtype=torch.float32))
        self._write(self.seeds[slot : slot + 1], np.array([signed64(join.seed)], np.int64))
        if params.logit_bias:
            self._write(self.bias_tokens[slot], np.array(list(params.logit_bias.keys()), np.int32))
            self._write(self.bias_values[slot], np.array(list(params.logit_bias.values()), np.float32))

    def append_blocks(self, appended: Sequence[tuple[int, int, int]]) -> None:
        """Write (slot, index, block) into the block tables, all in one upload."""
        if not appended:
            return
        slots, index, blocks = np.array(appended, np.int64).T
        flat = slots * self.block_table.shape[1] + index
        packed = self._upload(torch.from_numpy(np.stack([flat, blocks])))
        self.block_table.view(-1).index_copy_(0, packed[0], packed[1].int())

    def _write(self, target: Tensor, values: np.ndarray) -> None:
        target[: len(values)].copy_(self._upload(torch.from_numpy(values)), non_blocking=True)

    def _write_column(self, table: Tensor, slot: int, values: Tensor) -> None:
        table[:, slot].copy_(self._upload(values), non_blocking=True)

    def _upload(self, values: Tensor) -> Tensor:
        # Pinned memory that a copy still reads is not handed out again: the allocator waits for it.
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values
