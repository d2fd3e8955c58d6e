"""What a stream keeps in attention layers: keys and values in one buffer for all rows, a cursor per row.

A cache here is what mlx-lm's attention expects of one (``offset``, ``update_and_fetch``, ``make_mask``) for the rows of
the current feed. Appending writes into the buffer where it lies: nothing may hold on to an older version of it across
a step, or MLX would have to copy it. A write beyond a row's cursor is harmless: it is overwritten before it is read.
"""

from __future__ import annotations

import mlx.core as mx

from slipstream.runners.mlx.grid import Feed

FIRST_LENGTH = 256


class FeedHolder:
    """The feed that all caches of a forward serve."""

    def __init__(self) -> None:
        self._feed: Feed | None = None
        self.kept: list[mx.array] = []  # what rows keep for others in this step, not yet evaluated

    @property
    def feed(self) -> Feed:
        assert self._feed is not None, "no forward is running"
        return self._feed

    def set(self, feed: Feed) -> None:
        self._feed = feed


class KvCache:
    """One attention layer's keys and values, [rows, kv heads, length, head dim] each.

    Both dimensions double when they must, up to the limits that the memory plan counted with.
    """

    def __init__(self, holder: FeedHolder, max_rows: int, max_length: int, window: int | None = None) -> None:
        self._holder = holder
        self._max_rows = max_rows
        self._max_length = max_length
        self._window = window  # a layer that looks back only so far
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """int32 [rows]"""
        return self._holder.feed.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Both [rows, kv heads, width, head dim] -> [rows, kv heads, reach, head dim]."""
        feed = self._holder.feed
        self._keys = _append(self._roomy(self._keys, keys), keys, feed)
        self._values = _append(self._roomy(self._values, values), values, feed)
        return _fetch(self._keys, feed), _fetch(self._values, feed)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """bool [rows, 1, width, reach], or mlx-lm's own word for what a single row needs."""
        feed = self._holder.feed
        assert num_tokens == feed.width
        window = window_size or self._window
        if len(feed.spans) == 1 and not return_array and (window is None or feed.reach <= window):
            return "causal" if num_tokens > 1 else None
        keys = mx.arange(feed.reach, dtype=mx.int32)
        queries = feed.positions[:, None, :, None]  # [rows, 1, width, 1]
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    def move(self, source: int, target: int) -> None:
        """A row moves in the buffer. The copy of the row is finished before the buffer is written."""
        if self._keys is None or self._values is None or source >= self._keys.shape[0]:
            return  # the row has not been fed yet
        self._copy(source, target)

    def fork(self, source_slot: int, slot: int, source: int, target: int) -> None:
        """A row begins as a copy of another. Kept by row of the buffer, not by slot."""
        if self._keys is None or self._values is None:
            return  # a head that need not learn of these rows
        self._keys, self._values = (self._enlarged(buffer, target + 1, 0) for buffer in self.arrays())
        self._copy(source, target)

    def read_row(self, row: int, first: int, end: int) -> tuple[mx.array, mx.array] | None:
        """Some positions of a row, [kv heads, positions, head dim] each. None: no row was ever fed."""
        if self._keys is None or self._values is None:
            return None
        return self._keys[row, :, first:end], self._values[row, :, first:end]

    def write_row(self, row: int, keys: mx.array, values: mx.array) -> None:
        """The first positions of a row, [1, kv heads, positions, head dim] each."""
        num_positions = keys.shape[2]
        self._keys, self._values = (
            self._enlarged(_empty(new) if buffer is None else buffer, row + 1, num_positions)
            for buffer, new in ((self._keys, keys), (self._values, values))
        )
        self._keys[row : row + 1, :, :num_positions] = keys
        self._values[row : row + 1, :, :num_positions] = values

    def _copy(self, source: int, target: int) -> None:
        assert self._keys is not None
        assert self._values is not None
        row = mx.array([source])
        keys, values = (mx.take(buffer, row, axis=0) for buffer in (self._keys, self._values))
        mx.eval(keys, values)
        self._keys[target : target + 1], self._values[target : target + 1] = keys, values

    def leave(self, slot: int) -> None:
        """What the row wrote is overwritten before it is read."""

    def arrays(self) -> list[mx.array]:
        return [array for array in (self._keys, self._values) if array is not None]

    def drop(self) -> None:
        self._keys = self._values = None

    def _roomy(self, buffer: mx.array | None, new: mx.array) -> mx.array:
        """The buffer, large enough for this feed."""
        feed = self._holder.feed
        if buffer is None:
            buffer = _empty(new)
        return self._enlarged(buffer, max(feed.buffer_rows) + 1, feed.reach)

    def _enlarged(self, buffer: mx.array, num_rows: int, reach: int) -> mx.array:
        rows = _grown(buffer.shape[0], num_rows, 1, self._max_rows)
        length = _grown(buffer.shape[2], reach, FIRST_LENGTH, self._max_length)
        if (rows, length) == (buffer.shape[0], buffer.shape[2]):
            return buffer
        larger = mx.zeros((rows, buffer.shape[1], length, buffer.shape[3]), buffer.dtype)
        larger[: buffer.shape[0], :, : buffer.shape[2]] = buffer
        return larger


def _empty(new: mx.array) -> mx.array:
    return mx.zeros((0, new.shape[1], 0, new.shape[3]), new.dtype)


def _grown(now: int, needed: int, first: int, limit: int) -> int:
    assert needed <= limit, f"{needed} are needed, but the caches were planned for {limit}"
    if needed <= now:
        return now
    size = max(now, first)
    while size < needed:
        size *= 2
    return min(size, limit)


def _append(buffer: mx.array, new: mx.array, feed: Feed) -> mx.array:
    if len(feed.spans) == 1:  # one row, at a position that the host knows
        row, start = feed.buffer_rows[0], feed.spans[0].start
        buffer[row : row + 1, :, start : start + feed.width] = new
    else:
        buffer[feed.rows[:, None], :, feed.positions] = new.swapaxes(1, 2)
    return buffer


def _fetch(buffer: mx.array, feed: Feed) -> mx.array:
    if feed.contiguous:
        return buffer[feed.buffer_rows[0] : feed.buffer_rows[-1] + 1, :, : feed.reach]
    return buffer[:, :, : feed.reach][feed.rows]
