"""Device memory that all steps share. A captured step reads and writes these very addresses, so nothing ever moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.engine.contract import MAX_KEEPS
from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.recurrent.gdn import max_deferred
from slipstream.runners.cuda.layout import (
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    Inputs,
    StepShape,
    aligned,
    bucket,
    input_sizes,
    unpack,
)
from slipstream.runners.torch.caches import max_replay
from slipstream.sampling.params import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class TokenBuffers:
    """By token of a step, or by row of a draft pass: the step's tokens are computed by then. int32 [max tokens]"""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    next_tokens: Tensor  # the token after each, once the step is committed
    sample_slots: Tensor  # by sample
    sample_index: Tensor  # by sample: the index of the token being sampled


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """By row of a step. int32 [max rows]"""

    starts: Tensor
    fed: Tensor
    known: Tensor
    replay: Tensor
    stores: Tensor
    last: Tensor  # flat index of each row's last committed token


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """By row of a draft pass. int32 [max rows]"""

    offsets: Tensor
    starts: Tensor
    fed: Tensor
    known: Tensor
    replay: Tensor
    tile_rows: Tensor
    tile_firsts: Tensor


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    index: Tensor  # int64 [max tokens]: flat index of the tokens before those whose log-probability is reported
    values: Tensor  # float64 [max tokens, 1 + 2 * top]: log-probability, ids of the likeliest tokens, theirs


class StepBuffers:
    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        max_depth: int,
        block_table: Tensor,
        hidden: int,
        dtype: torch.dtype,
        *,
        keeps_states: bool = False,
    ) -> None:
        """``keeps_states``: there are state slots, into which rows may copy their recurrent state."""
        device = block_table.device
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        longs = partial(torch.zeros, dtype=torch.int64, device=device)
        self.block_table = block_table
        self.max_depth = max_depth
        self.max_keeps = MAX_KEEPS if keeps_states else 0
        self.max_rows = rows = bucket(ROW_BUCKETS, num_slots)
        self.max_tokens = tokens = max(bucket(TOKEN_BUCKETS, max_tokens), rows * (1 + max_depth))
        largest = StepShape(rows, tokens, tokens, tokens + rows, 1, 0, True, True, True)
        self.upload = ints(sum(map(aligned, input_sizes(largest, rows, max_depth))))
        self.by_token = TokenBuffers(*(ints(tokens) for _ in range(7)))
        self.by_row = RowBuffers(*(ints(rows) for _ in range(6)))
        self.draft = DraftBuffers(*(ints(rows) for _ in range(7)))
        # By row of a draft pass, the row of the step. And by that, the hidden state for its next draft; padding writes
        # to the last one.
        self.draft_sources = longs(rows)
        self.draft_hidden = torch.zeros(rows + 1, hidden, dtype=dtype, device=device)
        self._hidden = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        values = torch.zeros(tokens, 1 + 2 * MAX_TOP_LOGPROBS, dtype=torch.float64, device=device)
        self.logprobs = LogprobBuffers(longs(tokens), values)

    def inputs(self, shape: StepShape) -> Inputs[Tensor]:
        return unpack(self.upload, input_sizes(shape, self.max_rows, self.max_depth))

    def hidden(self, shape: StepShape) -> Tensor:
        """The target model's output, handed from one captured half of a step to the other. [tokens, hidden]"""
        return self._hidden[: shape.num_tokens]

    def samples(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Slot and index of each, of a step or of a draft pass."""
        return self.by_token.sample_slots[:num_samples], self.by_token.sample_index[:num_samples]

    def next_tokens(self, shape: StepShape) -> Tensor:
        return self.by_token.next_tokens[: shape.num_tokens]

    def row_last(self, shape: StepShape) -> Tensor:
        return self.by_row.last[: shape.num_rows]

    def step(self, shape: StepShape) -> DeviceBatch:
        inputs, by_token, by_row = self.inputs(shape), self.by_token, self.by_row
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        return DeviceBatch(
            num_rows=num_rows,
            num_tokens=num_tokens,
            tokens=by_token.tokens[:num_tokens],
            positions=by_token.positions[:num_tokens],
            rope_positions=by_token.positions[:num_tokens],
            token_slots=by_token.slots[:num_tokens],
            token_rows=by_token.rows[:num_tokens],
            row_slots=inputs.row_slots,
            row_offsets=inputs.row_offsets,
            row_starts=by_row.starts[:num_rows],
            row_fed=by_row.fed[:num_rows],
            row_committed=by_row.known[:num_rows],
            row_replay=by_row.replay[:num_rows],
            max_replay=max_replay(self.max_depth),
            row_stores=by_row.stores[:num_rows],
            max_deferred=max_deferred(num_rows),
            keep_positions=inputs.keep_positions,
            keep_states=inputs.keep_states,
            max_keeps=self.max_keeps,
            tile_rows=inputs.tile_rows,
            tile_firsts=inputs.tile_firsts,
            tile_size=shape.tile_size,
            block_table=self.block_table,
            context_hint=shape.context,
            has_prompts=shape.has_prompts,
        )

    def draft_inputs(self) -> Inputs[Tensor]:
        """As draft passes see them, whatever the shape of their step: as many rows as there can be, no more parts."""
        shape = StepShape(self.max_rows, 0, 0, 0, 1, 0, False, True, True)
        return unpack(self.upload, input_sizes(shape, self.max_rows, self.max_depth))

    def draft_batch(self, num_rows: int, context: int) -> DeviceBatch:
        """The batch of a draft pass: one token a row."""
        by_token, draft = self.by_token, self.draft
        return DeviceBatch(
            num_rows=num_rows,
            num_tokens=num_rows,
            tokens=by_token.tokens[:num_rows],
            positions=by_token.positions[:num_rows],
            rope_positions=by_token.positions[:num_rows],
            token_slots=by_token.slots[:num_rows],
            token_rows=by_token.rows[:num_rows],
            row_slots=by_token.slots[:num_rows],
            row_offsets=draft.offsets[:num_rows],
            row_starts=draft.starts[:num_rows],
            row_fed=draft.fed[:num_rows],
            row_committed=draft.known[:num_rows],
            row_replay=draft.replay[:num_rows],
            max_replay=0,
            row_stores=draft.fed[:num_rows],
            max_deferred=0,
            keep_positions=by_token.slots[:0],
            keep_states=by_token.slots[:0],
            max_keeps=0,
            tile_rows=draft.tile_rows[:num_rows],
            tile_firsts=draft.tile_firsts[:num_rows],
            tile_size=1,
            block_table=self.block_table,
            context_hint=context,
            has_prompts=False,
        )

    def logprob_sources(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden state, slot and position of the tokens before those whose log-probability is reported."""
        index = self.logprobs.index[:count]
        return self._hidden[index], self.by_token.slots[index].long(), self.by_token.positions[index].long()

    def logprob_values(self, count: int, vocab_size: int) -> Tensor:
        """As wide as the vocabulary allows."""
        return self.logprobs.values[:count, : 1 + 2 * min(MAX_TOP_LOGPROBS, vocab_size)]
