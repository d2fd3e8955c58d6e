"""The third tier of the prefix cache: entries on disk, which outlive the process.

What host memory holds is written behind it by a thread of its own, and a prompt that only the disk knows is read
back into host memory before its row starts. The tree of what is on disk, and all decisions, belong to the engine's
thread: the other one only moves bytes between files and buffers that are held for it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from slipstream.cache.disk_store import DiskStore
from slipstream.cache.entry_file import StoredEntry
from slipstream.cache.prefix_tree import KeptState, Node, PrefixTree
from slipstream.engine.contract import HostBuffers

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 1e9  # a guess, until something was read
CLOSE_SECONDS = 60.0  # for what is still to be written when the engine ends


@dataclass(frozen=True, slots=True)
class DiskHit:
    """The part of a prompt that is on disk."""

    num_tokens: int = 0
    entries: tuple[StoredEntry, ...] = ()  # in the order of their tokens


NOT_ON_DISK = DiskHit()
Finish = Callable[[], None]
Done = Callable[[bool], None]  # whether it went well


class DiskTier:
    def __init__(self, store: DiskStore, buffers: HostBuffers, block_size: int, recurrent: bool) -> None:
        self._store, self._buffers, self._recurrent = store, buffers, recurrent
        self._tree = PrefixTree(block_size)  # its blocks are numbers of entries, each as often as it has blocks
        self._entries: dict[int, StoredEntry] = {}
        self._numbers = itertools.count()
        for entry in store.open():
            self._add(entry)
        self._work: SimpleQueue[tuple[Callable[[], bool], Done] | None] = SimpleQueue()
        self._done: SimpleQueue[Finish] = SimpleQueue()
        self.bytes_per_second = BYTES_PER_SECOND  # as it was read last
        self._num_open = 0  # pieces of work whose end has not been seen
        self._thread = threading.Thread(target=self._run, name="slipstream-cache-disk", daemon=True)
        self._thread.start()

    @property
    def has_work(self) -> bool:
        return self._num_open > 0

    def poll(self) -> None:
        """Sees what the other thread has done."""
        while not self._done.empty():
            self._num_open -= 1
            self._done.get()()

    def close(self) -> None:
        """Waits until all is written."""
        self._work.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._store.close()

    def find(self, key: Hashable, tokens: list[int]) -> DiskHit:
        path = self._tree.find(digest(key), tokens)
        nodes = list(path.nodes)
        if nodes and path.num_last < len(nodes[-1].blocks):
            nodes.pop()
        while nodes:
            hit = self._hit(nodes)
            if hit.num_tokens or not self._recurrent:
                return hit
            nodes.pop()
        return NOT_ON_DISK

    def _hit(self, nodes: list[Node]) -> DiskHit:
        """With recurrent layers, only if there is a state at the end of the nodes."""
        found = self._whole([number for node in nodes for number in node.blocks])
        end = found[-1].end if found else 0
        if not self._recurrent:
            return DiskHit(end, tuple(found))
        state = nodes[-1].state
        last = None if state is None else self._entries.get(state.slot)
        if last is None or end != nodes[-1].end:
            return NOT_ON_DISK
        return DiskHit(end, tuple(found) if found[-1] is last else (*found, last))

    def _whole(self, numbers: list[int]) -> list[StoredEntry]:
        """The entries of consecutive blocks, as far as they are there as a whole."""
        found: list[StoredEntry] = []
        for number, group in itertools.groupby(numbers):
            entry, size = self._entries.get(number), len(list(group)) * self._tree.block_size
            if entry is None or entry.end - entry.start != size or entry.start != (found[-1].end if found else 0):
                break
            found.append(entry)
        return found

    def _num_stored(self, key: Hashable, tokens: list[int]) -> int:
        """Tokens in whole entries, whether or not a row can start after them."""
        path = self._tree.find(digest(key), tokens)
        numbers = [number for node in path.nodes for number in node.blocks]
        found = self._whole(numbers[: path.num_tokens // self._tree.block_size])
        return found[-1].end if found else 0

    def write(self, key: Hashable, tokens: list[int], blocks: list[int], state: int | None, finish: Finish) -> None:
        """A prefix in host memory. ``finish``: called by `poll` when its buffers are free again."""
        start = self._num_stored(key, tokens)
        own = blocks[start // self._tree.block_size :]
        if not own and (state is None or self.find(key, tokens).num_tokens == len(tokens) - 1):
            finish()
            return
        name, views = digest(key), [self._buffers.block(index) for index in own]
        kept = None if state is None else self._buffers.state(state)

        # What is read comes after what is written: from now on it counts as stored.
        entry = self._store.describe(name, start, tokens, kept is not None)
        self._add(entry)

        def work() -> bool:
            self._buffers.wait()
            return self._store.write(name, start, tokens, views, kept) is not None

        def done(is_written: bool) -> None:
            if not is_written:
                self._forget(entry)
            finish()

        self._start(work, done)

    def touch(self, key: Hashable, tokens: list[int]) -> None:
        """These tokens were used again, from memory."""
        entries = self.find(key, tokens).entries

        def work() -> bool:
            for entry in entries:
                self._store.touch(entry)
            return True

        if entries:
            self._start(work, _nothing)

    def read(
        self, hit: DiskHit, num_known: int, blocks: list[int], state: int | None, finish: Callable[[bool], None]
    ) -> None:
        """Fill host memory with the end of a prefix, of which it has the first ``num_known`` tokens."""
        last = hit.entries[-1]
        parts = [entry for entry in hit.entries if entry.end > num_known or entry is last]
        first, size = parts[0].start, self._tree.block_size
        skipped = [memoryview(bytearray(self._buffers.block_bytes)) for _ in range(first, num_known, size)]
        views = [*skipped, *(self._buffers.block(index) for index in blocks)]
        bad = list[StoredEntry]()

        def work() -> bool:
            began = time.monotonic()
            bad.extend(
                itertools.islice((each for each in parts if not self._read_one(each, views, first, last, state)), 1)
            )
            if not bad:
                num_bytes = sum(entry.num_bytes for entry in parts)
                self.bytes_per_second = num_bytes / max(time.monotonic() - began, 1e-6)
            return not bad

        def done(is_read: bool) -> None:
            if not is_read:
                self._forget(bad[0] if bad else parts[0])
            finish(is_read)

        self._start(work, done)

    def _read_one(
        self, entry: StoredEntry, views: list[memoryview], first: int, last: StoredEntry, state: int | None
    ) -> bool:
        size = self._tree.block_size
        own = views[(entry.start - first) // size : (entry.end - first) // size]
        kept = None
        if entry.has_state:
            is_wanted = entry is last and state is not None
            kept = self._buffers.state(state or 0) if is_wanted else memoryview(bytearray(self._buffers.state_bytes))
        return self._store.read(entry, own, kept)

    def _start(self, work: Callable[[], bool], done: Done) -> None:
        self._num_open += 1
        self._work.put((work, done))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                is_good = work()
            except Exception:
                log.exception("prefix cache: the disk could not be used")
                is_good = False
            self._done.put(partial(done, is_good))

    # The tree of what is on disk.

    def _add(self, entry: StoredEntry) -> None:
        """An entry whose beginning is in no other one is of no use."""
        tokens, size = list(entry.tokens), self._tree.block_size
        path = self._tree.find(entry.key, tokens)
        if path.num_tokens < entry.start:
            return
        number = next(self._numbers)
        self._entries[number] = entry
        before = [block for node in path.nodes for block in node.blocks][: entry.start // size]
        blocks = before + [number] * ((entry.end - entry.start) // size)
        if not blocks:
            return
        node, _ = self._tree.insert(entry.key, tokens, blocks)
        if entry.has_state and node.state is None:
            node.state = KeptState(number, node, set(), 0)

    def _forget(self, entry: StoredEntry) -> None:
        """The file is gone or damaged, and what continues it is of no use."""
        left = sorted((each for each in self._entries.values() if each.path != entry.path), key=lambda each: each.start)
        self._tree = PrefixTree(self._tree.block_size)
        self._entries.clear()
        for each in left:
            self._add(each)


def digest(key: Hashable) -> str:
    """Of a salt, among others: it is not written anywhere."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _nothing(is_good: bool) -> None:
    pass
