"""How a plan's rows lie in the flat batch: computed on the host, uploaded as one array of int32.

A row gets as many tokens of the batch as it may feed at most; how many of them count is known to the device alone.
Sizes are rounded up to buckets where a step can be captured, so that few graphs serve all loads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from slipstream.engine.contract import MAX_KEEPS
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.kernels.attention.tiles import PROMPT_TILE
from slipstream.runners.cuda.kernels.matmul.linear_quantized import compiled_for

ROW_BUCKETS = tuple(1 << i for i in range(11))
TOKEN_BUCKETS = (
    *(16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 16384),
)  # up to the first our products cost the same; multiples of 16, so that kernels are compiled once
CONTEXT_BUCKETS = (512, 2048, 8192, 32768, 131072, 1 << 20, 1 << 30)
PROMPT_CONTEXT = CONTEXT_BUCKETS[3]

T = TypeVar("T")


def bucket(buckets: Sequence[int], size: int) -> int:
    return buckets[bisect_left(buckets, size)]


def aligned(length: int) -> int:
    """Room for so many numbers, after which the next part begins at 16 bytes again: kernels are compiled once."""
    return -(-length // 4) * 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a captured step depends on beside the contents of the buffers."""

    num_rows: int
    num_tokens: int
    num_samples: int
    num_tiles: int
    tile_size: int
    context: int
    has_prompts: bool
    plain: bool  # every row takes the largest logit as it is
    feeds_head: bool  # some row may draft now or later
    masked: bool = False  # some row that samples is constrained

    @property
    def target(self) -> StepShape:
        """All that the target model's forward depends on: not how tokens are sampled from it."""
        return replace(self, plain=True, feeds_head=False, masked=False)

    @property
    def feeds_head_apart(self) -> bool:
        """The host may read the verdict of constrained rows while the head is fed: two graphs instead of one."""
        return self.feeds_head and self.masked

    @property
    def kind(self) -> Hashable:
        """Steps of a kind use the same kernels. One that reads prompts is worth a capture when it comes again."""
        if self.has_prompts:
            return self
        return compiled_for(self.num_tokens), self.tile_size, self.context, self.plain, self.feeds_head, self.masked


class Inputs(NamedTuple, Generic[T]):
    """The parts of the uploaded array in their order, each padded.

    All up to row_slots begin at the same address whatever the step's shape: draft passes are captured apart from steps.
    """

    draft_rows: T  # [depth * max rows]: the rows of draft pass 1, 2, ...; -1: padding
    thresholds: T  # [max rows]: bits of float32, as the next; see DraftRequest
    continue_thresholds: T  # [max rows]
    row_slots: T  # [rows]
    row_offsets: T  # [rows]: flat index of each row's first token
    row_feed: T  # [rows]: tokens fed at most
    row_samples: T  # [rows]: index of its first sample among the step's; -1: it does not sample
    keep_positions: T  # [rows * MAX_KEEPS]: where a row's recurrent state is kept, if this step passes it; -1: padding
    keep_states: T  # [rows * MAX_KEEPS]: the state slot of each
    token_rows: T  # [tokens]; -1: padding
    tile_rows: T  # [tiles]: row of each piece of attention work; -1: padding
    tile_firsts: T  # [tiles]: its first token, counted from the row's offset
    sample_flat: T  # [samples]: flat index of each; -1: padding


PADDING = Inputs(-1, 0, 0, 0, 0, 0, -1, -1, 0, -1, -1, 0, -1)


def input_sizes(shape: StepShape, max_rows: int, max_depth: int) -> Inputs[int]:
    rows, tiles = shape.num_rows, shape.num_tiles
    drafting = (max_depth * max_rows, max_rows, max_rows)
    keeps = (rows * MAX_KEEPS, rows * MAX_KEEPS)
    return Inputs(*drafting, rows, rows, rows, rows, *keeps, shape.num_tokens, tiles, tiles, shape.num_samples)


def pack(parts: Inputs[np.ndarray], sizes: Inputs[int]) -> np.ndarray:
    upload = np.empty(sum(map(aligned, sizes)), np.int32)
    first = 0
    for part, size, padding in zip(parts, sizes, PADDING, strict=True):
        upload[first : first + len(part)] = part
        upload[first + len(part) : first + aligned(size)] = padding
        first += aligned(size)
    return upload


def unpack(upload: Tensor, sizes: Inputs[int]) -> Inputs[Tensor]:
    """Views of the uploaded array."""
    views, first = [], 0
    for size in sizes:
        views.append(upload[first : first + size])
        first += aligned(size)
    return Inputs(*views)


@dataclass(frozen=True, slots=True)
class Layout:
    shape: StepShape
    upload: np.ndarray  # int32: the packed inputs
    draft_rows: tuple[int, ...]  # the rows of the first draft pass
    pass_rows: tuple[int, ...]  # padded number of rows in draft pass 1, 2, ...
    first_samples: tuple[int, ...]  # of each row among the step's samples; -1: it does not sample


def lay_out(
    feeds: Sequence[RowFeed],
    max_known: int,
    max_depth: int,
    max_rows: int,
    *,
    max_context: int = PROMPT_CONTEXT,
    plain: bool = True,
    feeds_head: bool = True,
    masked: bool = False,
) -> Layout:
    """``max_known``: no row has more tokens after this step, drafts included; ``max_context``: nor ever."""
    feed = np.array([row.feed for row in feeds], np.int32)
    num_before = np.array([row.num_before for row in feeds], np.int32)
    num_samples = feed - num_before
    has_prompts = any(row.feed > 1 + max_depth or row.num_uncomputed > 1 for row in feeds)
    if has_prompts:  # few contexts: each new shape is a pause
        max_known = max(max_known, min(max_context, PROMPT_CONTEXT))
    shape = _shape(feed, has_prompts, bucket(CONTEXT_BUCKETS, max_known), max_depth)
    shape = replace(shape, plain=plain, feeds_head=feeds_head, masked=masked)
    offsets = np.cumsum(feed) - feed
    first_samples = np.where(num_samples > 0, np.cumsum(num_samples) - num_samples, -1)
    flat = np.arange(int(feed.sum()), dtype=np.int32)
    token_rows = np.repeat(np.arange(len(feeds), dtype=np.int32), feed)
    is_sample = flat - offsets[token_rows] >= num_before[token_rows]
    tile_rows, tile_firsts = _tiles(feed, shape.tile_size)
    depths = np.where(num_samples > 0, [row.draft.depth for row in feeds], 0)
    draft_rows, pass_rows = _passes(depths, max_depth, max_rows)
    keep_positions, keep_states = _keeps(feeds)
    inputs = Inputs(
        draft_rows=draft_rows,
        thresholds=_bits([row.draft.threshold for row in feeds]),
        continue_thresholds=_bits([row.draft.continue_threshold for row in feeds]),
        row_slots=np.array([row.slot for row in feeds]),
        row_offsets=offsets,
        row_feed=feed,
        row_samples=first_samples,
        keep_positions=keep_positions,
        keep_states=keep_states,
        token_rows=token_rows,
        tile_rows=tile_rows,
        tile_firsts=tile_firsts,
        sample_flat=flat[is_sample],
    )
    upload = pack(inputs, input_sizes(shape, max_rows, max_depth))
    drafting = tuple(np.flatnonzero(depths).tolist())
    return Layout(shape, upload, drafting, pass_rows, tuple(first_samples.tolist()))


def _shape(feed: np.ndarray, has_prompts: bool, context: int, max_depth: int) -> StepShape:
    num_rows, num_tokens = len(feed), int(feed.sum())
    tokens, rows = bucket(TOKEN_BUCKETS, num_tokens), bucket(ROW_BUCKETS, num_rows)
    if has_prompts:  # bounds that hold for any rows of these sizes
        num_tiles, num_samples = tokens // PROMPT_TILE + rows, min(tokens, rows * (1 + max_depth))
        return StepShape(rows, tokens, num_samples, num_tiles, PROMPT_TILE, context, True, True, True)
    longest, tile = (1, 1) if int(feed.max()) == 1 else (1 + max_depth, 1 << max_depth.bit_length())
    if rows * longest < TOKEN_BUCKETS[0]:  # no more graphs for it: few rows have one of each kind
        tokens = rows * longest
    return StepShape(rows, tokens, tokens, rows, tile, context, False, True, True)


def _bits(values: Sequence[float]) -> np.ndarray:
    return np.array(values, np.float32).view(np.int32)


def _keeps(feeds: Sequence[RowFeed]) -> tuple[np.ndarray, np.ndarray]:
    """Position and state slot of what each row keeps; where no layer is recurrent, there is nothing to copy."""
    positions = np.full(len(feeds) * MAX_KEEPS, PADDING.keep_positions, np.int32)
    states = np.full(len(feeds) * MAX_KEEPS, PADDING.keep_states, np.int32)
    for row, feed in enumerate(feeds):
        for i, keep in enumerate(feed.keeps):
            if keep.state is not None:
                positions[row * MAX_KEEPS + i], states[row * MAX_KEEPS + i] = keep.position, keep.state
    return positions, states


def _tiles(feed: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    count = -(-feed // size)
    rows = np.repeat(np.arange(len(feed), dtype=np.int32), count)
    first = (np.arange(len(rows)) - (np.cumsum(count) - count)[rows]) * size
    return rows, first


def _passes(depths: np.ndarray, max_depth: int, max_rows: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """The rows of each draft pass, in a field of their own, and how many there are, padded."""
    field = np.full((max_depth, max_rows), PADDING.draft_rows, np.int32)
    counts = []
    for ahead in range(int(depths.max(initial=0))):
        rows = np.flatnonzero(depths > ahead)
        field[ahead, : len(rows)] = rows
        counts.append(bucket(ROW_BUCKETS, len(rows)))
    return field.reshape(-1), tuple(counts)
