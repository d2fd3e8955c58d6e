"""What each slot holds on the device: tokens, cursor, drafts, and how its next token is chosen.

The host writes here when a stream joins; afterwards only kernels do, so the host need not know how far a row has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.contract import RowJoin, RowStep
from slipstream.runners.cuda.kernels.step import RowState
from slipstream.runners.rows import Asked, asked_by
from slipstream.runners.torch.noise import signed64
from slipstream.sampling.params import MAX_BIAS, SamplingParams

_INTS = ("known", "cursor", "drafts", "replay", "num_prompt", "top_k", "num_bias", "greedy")
_FLOATS = ("inv_temperature", "p_min", "repetition", "presence", "frequency", "top_p", "min_p")


class DeviceRows:
    def __init__(self, num_slots: int, num_places: int, blocks_per_slot: int, device: torch.device) -> None:
        self.device = device
        self.num_slots = num_slots
        self.tokens = torch.zeros(num_slots, num_places, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_slots, blocks_per_slot, dtype=torch.int32, device=device)
        self._ints = torch.zeros(len(_INTS), num_slots, dtype=torch.int32, device=device)
        self._floats = torch.zeros(len(_FLOATS), num_slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.bias_tokens = torch.zeros(num_slots, MAX_BIAS, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(num_slots, MAX_BIAS, dtype=torch.float32, device=device)
        self.gaps: dict[int, int] = {}  # of each taken slot: known tokens not computed yet, once all plans are done
        self.asked: dict[int, Asked] = {}
        self._num_blocks: dict[int, int] = {}
        self._plain: dict[int, bool] = {}
        self._may_draft: dict[int, bool] = {}
        known, cursor, drafts, replay = (self.int_field(name) for name in ("known", "cursor", "drafts", "replay"))
        self.state = RowState(self.tokens, known, cursor, drafts, replay, self.float_field("p_min"), self.seeds)

    def int_field(self, name: str) -> Tensor:
        return self._ints[_INTS.index(name)]

    def float_field(self, name: str) -> Tensor:
        return self._floats[_FLOATS.index(name)]

    def __len__(self) -> int:
        return len(self.gaps)

    def plain(self, slot: int) -> bool:
        """Its next token is the largest logit, as the model gives it."""
        return self._plain[slot]

    def may_draft(self, slot: int) -> bool:
        return self._may_draft[slot]

    def join(self, join: RowJoin) -> None:
        assert 0 <= join.slot < self.num_slots
        assert join.slot not in self.gaps, f"slot {join.slot} is taken"
        params, slot = join.params, join.slot
        cursor = join.start.num_computed
        self.gaps[slot] = len(join.tokens) - cursor
        self.asked[slot] = asked_by(join)
        self._num_blocks[slot] = 0
        self._plain[slot] = is_plain(params)
        self._may_draft[slot] = join.may_draft
        self._write(self.tokens[slot], np.array(join.tokens, np.int32))
        drawing = (params.top_k, len(params.logit_bias), int(params.greedy))
        ints = (len(join.tokens), cursor, 0, 0, join.num_prompt, *drawing)
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

    def leave(self, slot: int) -> None:
        for known in (self.gaps, self.asked, self._num_blocks, self._plain, self._may_draft):
            del known[slot]

    def grow(self, joins: Sequence[RowJoin], steps: Sequence[RowStep]) -> None:
        """Append the blocks that forks and steps bring to their rows' tables, all in one upload."""
        brought = [(join.slot, join.start.blocks) for join in joins if join.start.blocks]
        places: list[int] = []
        blocks: list[int] = []
        for slot, new in [*brought, *((step.slot, step.blocks) for step in steps)]:
            first = slot * self.block_table.shape[1] + self._num_blocks[slot]
            places += range(first, first + len(new))
            blocks += new
            self._num_blocks[slot] += len(new)
        if blocks:
            packed = self._upload(torch.tensor([places, blocks]))
            self.block_table.view(-1).index_copy_(0, packed[0], packed[1].int())

    def advance(self, step: RowStep) -> None:
        """What the host knows of a row after a planned step."""
        gap = self.gaps[step.slot]
        self.gaps[step.slot] = gap - step.feed if step.feed < gap else 1

    def _write(self, place: Tensor, values: np.ndarray) -> None:
        place[: len(values)].copy_(self._upload(torch.from_numpy(values)), non_blocking=True)

    def _write_column(self, table: Tensor, slot: int, values: Tensor) -> None:
        table[:, slot].copy_(self._upload(values), non_blocking=True)

    def _upload(self, values: Tensor) -> Tensor:
        # Pinned memory that a copy still reads is not handed out again: the allocator waits for it.
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values


def is_plain(params: SamplingParams) -> bool:
    return params.greedy and not params.needs_history and not params.logit_bias
