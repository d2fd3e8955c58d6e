"""Gated DeltaNet with drafts: mlx-lm's layer, its weights and its recurrence, around a tape.

The state stands after the last committed token. The raw inputs of the drafts after it are kept, and the next step feeds
those that were accepted to the recurrence again, in front of its own tokens: a rejection costs nothing and no state is
kept twice. Each row's inputs are laid out with all commit points in one column, padding in front of them masked. Where
a row keeps a state for others, the recurrence of all rows is cut in two: it goes token by token, so nothing changes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from slipstream.runners.mlx.caches import FeedHolder
from slipstream.runners.mlx.states import StateStore, one_row
from slipstream.runners.rows import RowSpan


class GdnCache:
    """One layer's state, and its past: the drafts' inputs after the commit point, then the conv window before it."""

    def __init__(self, holder: FeedHolder, max_depth: int) -> None:
        self.holder = holder
        self.max_depth = max_depth
        self.store = StateStore()

    def make_mask(self, num_tokens: int) -> None:
        """The layer knows its rows from the feed."""
        return

    def leave(self, slot: int) -> None:
        self.store.leave(slot)

    def fork(self, source_slot: int, slot: int, source: int, target: int) -> None:
        self.store.fork(source_slot, slot)

    def start(self, state_slot: int, slot: int) -> None:
        self.store.start(state_slot, slot)

    def keep(self, state_slot: int, state: mx.array, window: mx.array) -> None:
        """For rows that start from it, without drafts to replay. Both [1, ...]"""
        tape = mx.zeros((1, self.max_depth, window.shape[2]), window.dtype)
        kept = (state, mx.concatenate([tape, window], axis=1))
        self.store.keep(state_slot, kept)
        self.holder.kept += kept

    def move(self, source: int, target: int) -> None:
        """Kept by slot, not by row of a buffer."""

    def arrays(self) -> list[mx.array]:
        return self.store.arrays()


class TapedGdn(nn.Module):
    """Stands in the place of an mlx-lm ``GatedDeltaNet`` and owns it."""

    def __init__(self, layer: Any, tiled: bool = False) -> None:
        """``tiled``: as in GdnSpec."""
        super().__init__()
        self.layer = layer
        self._tiled = tiled
        self._window = layer.conv_kernel_size - 1

    def __call__(self, inputs: mx.array, mask: mx.array | None, cache: GdnCache) -> mx.array:
        layer, feed = self.layer, cache.holder.feed
        at = _layout(feed.spans, self._window, cache.max_depth)
        # [rows, width, conv channels + 2 * v heads]
        raw = mx.concatenate([layer.in_proj_qkv(inputs), layer.in_proj_a(inputs), layer.in_proj_b(inputs)], axis=-1)
        state, past = cache.store.get(feed.slots, self._fresh(raw, cache.max_depth))
        known = mx.concatenate([past, raw], axis=1)
        columns = _pick(known, at.columns)  # [rows, window + before + after, ...]
        q, k, v = self._conv(columns[..., : layer.conv_dim])
        a, b = mx.split(columns[:, self._window :, layer.conv_dim :], 2, axis=-1)
        parts = [q, k, v, a, b]
        mixed, state = self._commit(parts, state, at, cache, columns)
        if at.after:
            ahead, _ = self._recur([x[:, at.before :] for x in parts], state, None)
            mixed = mx.concatenate([mixed, ahead], axis=1)
        cache.store.put(feed.slots, (state, _pick(known, at.past)))
        rows, width, _ = inputs.shape
        heads = _pick(mixed.flatten(2), at.fed).reshape(rows, width, layer.num_v_heads, layer.head_v_dim)
        z = layer.in_proj_z(inputs).reshape(heads.shape)
        out: mx.array = layer.out_proj(layer.norm(heads, z).flatten(2))
        return out

    def _fresh(self, raw: mx.array, max_depth: int) -> tuple[mx.array, mx.array]:
        layer = self.layer
        state = mx.zeros((1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), mx.float32)
        return state, mx.zeros((1, self._window + max_depth, raw.shape[-1]), raw.dtype)

    def _conv(self, columns: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[rows, columns, heads, dim] of q, k and v."""
        layer = self.layer
        q, k, v = mx.split(nn.silu(layer.conv1d(columns)), [layer.key_dim, 2 * layer.key_dim], axis=-1)
        q, k = (x.reshape(*x.shape[:2], layer.num_k_heads, layer.head_k_dim) for x in (q, k))
        q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=1e-6)
        if self._tiled:  # mlx-lm would repeat each key head for a group of value heads
            q, k = (mx.tile(x, (1, 1, layer.num_v_heads // layer.num_k_heads, 1)) for x in (q, k))
        return q, k, v.reshape(*v.shape[:2], layer.num_v_heads, layer.head_v_dim)

    def _commit(
        self, parts: list[mx.array], state: mx.array, at: _Layout, cache: GdnCache, columns: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The recurrence up to the commit point, in pieces: after each somebody keeps the state."""
        outputs, first = [], 0
        for end, kept in at.pieces:
            mask = None if at.mask is None else at.mask[:, first:end]
            mixed, state = self._recur([x[:, first:end] for x in parts], state, mask)
            outputs.append(mixed)
            for row, state_slot in kept:
                cache.keep(state_slot, one_row(state, row), columns[row : row + 1, end : end + self._window])
            first = end
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state

    def _recur(self, parts: list[mx.array], state: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        mixed, new_state = gated_delta_update(*parts, self.layer.A_log, self.layer.dt_bias, state, mask)
        return mixed, new_state


class _Layout:
    """Which inputs of [tape | window | fed] stand in which column of [window | replayed + committed | drafts]."""

    def __init__(self, spans: tuple[RowSpan, ...], window: int, max_depth: int) -> None:
        self.before = max(span.num_replay + span.num_committed for span in spans)
        self.after = max(span.num_drafts for span in spans)
        first_fed = max_depth + window  # where a step's own inputs begin
        width = max(span.num_fed for span in spans)
        columns, past, fed, mask = [], [], [], []
        kept: dict[int, list[tuple[int, int]]] = {self.before: []}  # by column
        for index, span in enumerate(spans):
            own = range(first_fed, first_fed + span.num_fed)
            real = [*range(max_depth, first_fed), *range(span.num_replay), *own]
            lead = self.before - span.num_replay - span.num_committed
            row = [0] * lead + real + [real[-1]] * (self.after - span.num_drafts)
            columns.append(row)
            commit = first_fed + span.num_committed  # after it are this step's drafts
            tape = [
                commit + i if i < span.num_drafts else max(0, commit - window - max_depth + i) for i in range(max_depth)
            ]
            past.append(tape + row[self.before : self.before + window])
            start = self.before - span.num_committed
            fed.append([min(start + i, self.before + self.after - 1) for i in range(width)])
            mask.append([column >= lead for column in range(self.before)])
            for num_tokens, state_slot in span.kept_states:
                kept.setdefault(lead + num_tokens, []).append((index, state_slot))
        self.columns = _picker(columns)  # [rows, window + before + after]
        self.past = _picker(past)  # [rows, max depth + window]
        self.fed = _picker(fed)  # [rows, width]
        # Where the recurrence is cut, and of which rows the state is kept there, in which state slots.
        self.pieces = sorted(kept.items())
        self.mask = None if all(map(all, mask)) else mx.array(mask)  # [rows, before]


@lru_cache(maxsize=1)
def _layout(spans: tuple[RowSpan, ...], window: int, max_depth: int) -> _Layout:
    """All layers of a forward share one."""
    return _Layout(spans, window, max_depth)


def _picker(index: list[list[int]]) -> slice | mx.array:
    """A slice, where all rows pick the same consecutive columns: plain decoding then moves nothing."""
    first = index[0]
    if first == list(range(first[0], first[0] + len(first))) and all(row == first for row in index):
        return slice(first[0], first[0] + len(first))
    return mx.array(index)[..., None]


def _pick(values: mx.array, at: slice | mx.array) -> mx.array:
    """values: [rows, n, ...]; at: [rows, m, 1] or a slice of n"""
    return values[:, at] if isinstance(at, slice) else mx.take_along_axis(values, at, axis=1)
