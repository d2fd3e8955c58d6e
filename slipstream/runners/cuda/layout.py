"""How a plan's rows lie in the flat batch: computed on the host, uploaded as one array of int32.

A row gets as many places as it may feed at most; how many of them count is known to the device alone. Sizes are
rounded up to buckets where a step can be captured, so that few graphs serve all loads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.kernels.matmul.linear_quantized import compiled_for
from slipstream.runners.logprobs import Telling
from slipstream.runners.rows import Asked
from slipstream.sampling.params import MAX_TOP_LOGPROBS

ROW_BUCKETS = tuple(1 << i for i in range(11))
TOKEN_BUCKETS = (
    *(16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 16384),
)  # up to the first our products cost the same; multiples of 16, so that kernels are compiled once
CONTEXT_BUCKETS = (512, 2048, 8192, 32768, 131072, 1 << 20, 1 << 30)
PROMPT_CONTEXT = CONTEXT_BUCKETS[3]
PROMPT_TILE = 32  # tokens of one piece of attention work where prompts are read


def bucket(buckets: Sequence[int], size: int) -> int:
    return buckets[bisect_left(buckets, size)]


def aligned(length: int) -> int:
    """Places for so many: what lies behind them begins at 16 bytes again, so that kernels are compiled once."""
    return -(-length // 4) * 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a captured step depends on beside what lies in the buffers."""

    num_rows: int
    num_tokens: int
    num_draws: int
    num_tiles: int
    tile_size: int
    context: int
    has_prompts: bool
    plain: bool  # every row takes the largest logit as it is
    feeds_head: bool  # some row may draft now or later
    masked: bool = False  # some row that draws is constrained

    @property
    def trunk(self) -> StepShape:
        """What the trunk's forward depends on: not how tokens are drawn from it."""
        return replace(self, plain=True, feeds_head=False, masked=False)

    @property
    def kind(self) -> Hashable:
        """Steps of a kind use the same kernels. One that reads prompts is worth a capture when it comes again."""
        if self.has_prompts:
            return self
        return compiled_for(self.num_tokens), self.tile_size, self.context, self.plain, self.feeds_head, self.masked

    @property
    def parts(self) -> list[int]:
        """Lengths of what is uploaded: row slots, offsets, feeds, draws; token rows; tile rows and firsts; draws."""
        return [self.num_rows] * 4 + [self.num_tokens] + [self.num_tiles] * 2 + [self.num_draws]


@dataclass(frozen=True, slots=True)
class Layout:
    shape: StepShape
    upload: np.ndarray  # int32: the draft passes' rows, then the parts
    pass_rows: tuple[int, ...]  # padded number of rows in draft pass 1, 2, ...
    first_draws: tuple[int, ...]  # of each row, among the step's draws; -1: it does not draw


class Buffers:
    """Device memory that all steps share. A captured step reads and writes these very addresses."""

    def __init__(
        self, num_slots: int, max_tokens: int, max_depth: int, block_table: Tensor, hidden: int, dtype: torch.dtype
    ) -> None:
        device = block_table.device
        self.block_table = block_table
        self.max_depth = max_depth
        self.max_rows = bucket(ROW_BUCKETS, num_slots)
        self.max_tokens = most = max(bucket(TOKEN_BUCKETS, max_tokens), self.max_rows * (1 + max_depth))
        self._passes = self.max_rows * max_depth
        self.upload = torch.zeros(self._passes + 8 * aligned(most), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(7, most, dtype=torch.int32, device=device)
        self._rows = torch.zeros(11, self.max_rows, dtype=torch.int32, device=device)
        self.sources = torch.zeros(self.max_rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(most, hidden, dtype=dtype, device=device)
        self.tells = torch.zeros(most, dtype=torch.int64, device=device)  # tokens behind which something is told
        self._told = torch.zeros(most, 1 + 2 * MAX_TOP_LOGPROBS, dtype=torch.float64, device=device)
        # Each row's hidden state for its next draft; the last one is where padding writes.
        self.draft_hidden = torch.zeros(self.max_rows + 1, hidden, dtype=dtype, device=device)

    def parts(self, shape: StepShape) -> tuple[Tensor, ...]:
        lengths = shape.parts
        places = [aligned(length) for length in lengths]
        pieces = self.upload[self._passes : self._passes + sum(places)].split(places)
        return tuple(piece[:length] for piece, length in zip(pieces, lengths, strict=True))

    def pass_rows(self, ahead: int, num_rows: int) -> Tensor:
        first = ahead * self.max_rows
        return self.upload[first : first + num_rows]

    @property
    def row_slots(self) -> Tensor:
        """Of the step's rows, whatever its shape: they lie first. [max rows]"""
        return self.upload[self._passes : self._passes + self.max_rows]

    def step(self, shape: StepShape) -> DeviceBatch:
        row_slots, row_offsets, _, _, _, tile_rows, tile_firsts, _ = self.parts(shape)
        tokens, positions, token_slots, token_rows = (part[: shape.num_tokens] for part in self._tokens[:4])
        starts, fed, certain, replay = (part[: shape.num_rows] for part in self._rows[:4])
        return DeviceBatch(
            num_rows=shape.num_rows,
            num_tokens=shape.num_tokens,
            tokens=tokens,
            positions=positions,
            token_slots=token_slots,
            token_rows=token_rows,
            row_slots=row_slots,
            row_offsets=row_offsets,
            row_starts=starts,
            row_fed=fed,
            row_certain=certain,
            row_replay=replay,
            max_replay=self.max_depth,
            tile_rows=tile_rows,
            tile_firsts=tile_firsts,
            tile_size=shape.tile_size,
            block_table=self.block_table,
            context_hint=shape.context,
            has_prompts=shape.has_prompts,
        )

    def hidden(self, shape: StepShape) -> Tensor:
        """What the trunk made of the step's tokens: handed from one captured half of a step to the other."""
        return self._hidden[: shape.num_tokens]

    def told(self, num_tells: int, vocab_size: int) -> Tensor:
        """What is told of each, as wide as the vocabulary allows."""
        return self._told[:num_tells, : 1 + 2 * min(MAX_TOP_LOGPROBS, vocab_size)]

    def tell_sources(self, num_tells: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden state, slot and position of the tokens behind which something is told."""
        places = self.tells[:num_tells]
        return self._hidden[places], self._tokens[2, places].long(), self._tokens[1, places].long()

    def draws(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        """Slot and index of each draw."""
        return self._tokens[4, : shape.num_draws], self._tokens[5, : shape.num_draws]

    def followers(self, shape: StepShape) -> Tensor:
        return self._tokens[6, : shape.num_tokens]

    def row_last(self, shape: StepShape) -> Tensor:
        return self._rows[4, : shape.num_rows]

    def draft(self, num_rows: int, context: int) -> DeviceBatch:
        """The batch of a draft pass: one token a row. Shares the token buffers of the step, which is over by then."""
        tokens, positions, slots, rows = (part[:num_rows] for part in self._tokens[:4])
        offsets, starts, fed, certain, replay, tiles = (part[:num_rows] for part in self._rows[5:])
        return DeviceBatch(
            num_rows=num_rows,
            num_tokens=num_rows,
            tokens=tokens,
            positions=positions,
            token_slots=slots,
            token_rows=rows,
            row_slots=slots,
            row_offsets=offsets,
            row_starts=starts,
            row_fed=fed,
            row_certain=certain,
            row_replay=replay,
            max_replay=0,
            tile_rows=tiles,
            tile_firsts=self._tokens[6, :num_rows],
            tile_size=1,
            block_table=self.block_table,
            context_hint=context,
            has_prompts=False,
        )

    def draft_draws(self, num_rows: int) -> tuple[Tensor, Tensor]:
        return self._tokens[4, :num_rows], self._tokens[5, :num_rows]


def lay_out(
    feeds: Sequence[RowFeed],
    most: int,
    max_depth: int,
    max_rows: int,
    *,
    longest: int = PROMPT_CONTEXT,
    plain: bool = True,
    feeds_head: bool = True,
) -> Layout:
    """``most``: no row has more tokens after this step; ``longest``: nor ever."""
    feed = np.array([row.feed for row in feeds], np.int32)
    first_draw = np.array([row.num_before for row in feeds], np.int32)  # counted from the row's offset
    num_draws = feed - first_draw
    has_prompts = any(row.feed > 1 + max_depth or row.num_uncomputed > 1 for row in feeds)
    if has_prompts:  # few contexts: each new shape is a pause
        most = max(most, min(longest, PROMPT_CONTEXT))
    shape = _shape(feed, has_prompts, bucket(CONTEXT_BUCKETS, most), max_depth, plain, feeds_head)
    offsets = np.cumsum(feed) - feed
    draws_before = np.cumsum(num_draws) - num_draws
    first_draws = np.where(num_draws > 0, draws_before, -1)
    places = np.arange(int(feed.sum()), dtype=np.int32)
    token_rows = np.repeat(np.arange(len(feeds), dtype=np.int32), feed)
    is_draw = places - offsets[token_rows] >= first_draw[token_rows]
    tile_rows, tile_firsts = _tiles(feed, shape.tile_size)
    parts = [
        _padded(np.array([row.slot for row in feeds]), aligned(shape.num_rows), 0),
        _padded(offsets, aligned(shape.num_rows), 0),
        _padded(feed, aligned(shape.num_rows), 0),
        _padded(first_draws, aligned(shape.num_rows), -1),
        _padded(token_rows, aligned(shape.num_tokens), -1),
        _padded(tile_rows, aligned(shape.num_tiles), -1),
        _padded(tile_firsts, aligned(shape.num_tiles), 0),
        _padded(places[is_draw], aligned(shape.num_draws), -1),
    ]
    propose = np.where(num_draws > 0, [row.draft.depth for row in feeds], 0)
    passes, pass_rows = _passes(propose, max_depth, max_rows)
    return Layout(shape, np.concatenate([passes, *parts]), pass_rows, tuple(first_draws.tolist()))


def _shape(
    feed: np.ndarray, has_prompts: bool, context: int, max_depth: int, plain: bool, feeds_head: bool
) -> StepShape:
    num_rows, num_tokens = len(feed), int(feed.sum())
    tokens, rows = bucket(TOKEN_BUCKETS, num_tokens), bucket(ROW_BUCKETS, num_rows)
    if has_prompts:  # bounds that hold for any rows of these sizes
        num_tiles, num_draws = tokens // PROMPT_TILE + rows, min(tokens, rows * (1 + max_depth))
        return StepShape(rows, tokens, num_draws, num_tiles, PROMPT_TILE, context, True, plain, feeds_head)
    longest, tile = (1, 1) if int(feed.max()) == 1 else (1 + max_depth, 1 << max_depth.bit_length())
    if rows * longest < TOKEN_BUCKETS[0]:  # no more graphs for it: few rows have one of each kind
        tokens = rows * longest
    return StepShape(rows, tokens, tokens, rows, tile, context, False, plain, feeds_head)


def _tiles(feed: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    count = -(-feed // size)
    rows = np.repeat(np.arange(len(feed), dtype=np.int32), count)
    first = (np.arange(len(rows)) - (np.cumsum(count) - count)[rows]) * size
    return rows, first


def _passes(propose: np.ndarray, max_depth: int, max_rows: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """For each pass the rows that take part, in a field of its own."""
    field = np.full((max_depth, max_rows), -1, np.int32)
    counts = []
    for ahead in range(int(propose.max(initial=0))):
        rows = np.flatnonzero(propose > ahead)
        field[ahead, : len(rows)] = rows
        counts.append(bucket(ROW_BUCKETS, len(rows)))
    return field.reshape(-1), tuple(counts)


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def find_telling(feeds: Sequence[RowFeed], asked: Sequence[Asked]) -> tuple[Telling, list[int]]:
    """What a step tells, and the flat places of the tokens before those of prompts.

    How many draws of a row will count is not known here: all are told of, and cut when they are read.
    """
    telling = Telling({}, {}, [], MAX_TOP_LOGPROBS)
    before: list[int] = []
    offset = 0
    for i, (row, wanted) in enumerate(zip(feeds, asked, strict=True)):
        if wanted.prompt_logprobs is not None and row.num_before:
            telling.prompt[i] = row.num_before
            before += range(offset, offset + row.num_before)
        if wanted.logprobs is not None and row.num_samples:
            telling.draws[i] = row.num_samples
            telling.places.extend(range(offset + row.num_before, offset + row.feed))
        offset += row.feed
    return telling, before
