"""The files of a disk store: how much they take, when each was last used, and which of them goes first.

Entries of other models, other processes and older versions lie in the same folder: they count, and they go by age like
the others. Only what is named like an entry is ever looked at or removed.
"""

from __future__ import annotations

import heapq
import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slipstream.cache.entry_file import TOKEN_BYTES, StoredEntry

ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.prefix")
TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.prefix\.[0-9a-f]{16}\.tmp")
MAX_NAMES = 1_000_000  # that are looked at: the folder may hold anything
MAX_FILES = 100_000  # of ours


@dataclass(slots=True)
class _File:
    num_bytes: int
    used: int  # nanoseconds of the system's clock
    entry: StoredEntry | None = None  # None: not of this model, or written by another process meanwhile


class DiskFolder:
    """Not for several threads at once."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.path = path
        self._block_size = block_size
        self._files: dict[str, _File] = {}
        # By key, sorted: what begins with the same tokens stands together.
        self._entries: dict[str, list[tuple[bytes, str]]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def scan(self) -> tuple[list[str], list[str], int]:
        """The names of entries, the newest first, and of temporary files; how many of either are no files."""
        found: dict[str, _File] = {}
        temporary: list[str] = []
        num_others = 0
        for item in self._items():
            is_entry = ENTRY_NAME.fullmatch(item.name) is not None
            if not is_entry and not TEMPORARY_NAME.fullmatch(item.name):
                continue
            if len(found) + len(temporary) == MAX_FILES:
                break
            with suppress(FileNotFoundError):
                if not item.is_file(follow_symlinks=False):
                    num_others += 1
                elif is_entry:
                    seen = item.stat(follow_symlinks=False)
                    found[item.name] = _File(seen.st_size, seen.st_mtime_ns)
                else:
                    temporary.append(item.name)
        for name in self._files.keys() - found.keys():
            self.forget(name)
        for name, file in found.items():
            self._set(name, file.num_bytes, file.used)
        return sorted(found, key=lambda name: -found[name].used), temporary, num_others

    def _items(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.path) as items:
            yield from islice(items, MAX_NAMES)

    def add(self, entry: StoredEntry, used: int | None = None) -> None:
        """An entry of this model; ``used``: now, where its file is new."""
        name = entry.path.name
        known = self._files.get(name)
        if used is None:
            used = known.used if known is not None else 0
        self._set(name, entry.num_bytes, used)
        if self._files[name].entry is None:
            self._files[name].entry = entry
            insort(self._entries.setdefault(entry.key, []), (entry.packed, name))

    def forget(self, name: str) -> None:
        """Its file is gone."""
        file = self._files.pop(name, None)
        if file is None:
            return
        self.num_bytes -= file.num_bytes
        if file.entry is not None:
            same = self._entries[file.entry.key]
            del same[bisect_left(same, (file.entry.packed, name))]
            if not same:
                del self._entries[file.entry.key]

    def _set(self, name: str, num_bytes: int, used: int) -> None:
        file = self._files.setdefault(name, _File(0, 0))
        self.num_bytes += num_bytes - file.num_bytes
        file.num_bytes, file.used = num_bytes, used

    # Who goes first.

    def bytes_before(self, entry: StoredEntry) -> int:
        """In entries that this one is of no use without."""
        same = (self._files[name] for _, name in self._entries.get(entry.key, ()))
        return sum(file.num_bytes for file in same if file.entry is not None and self._is_before(file.entry, entry))

    def remove_oldest(self, for_the_sake_of: StoredEntry) -> bool:
        """Of the entries that no other continues, neither those here nor the given one. False: there is none."""
        oldest = [(file.used, name) for name, file in self._files.items()]
        heapq.heapify(oldest)
        while oldest:
            used, name = heapq.heappop(oldest)
            entry = self._files[name].entry
            if entry is not None and (self._is_before(entry, for_the_sake_of) or self._is_continued(entry)):
                continue
            path = self.path / name
            with suppress(FileNotFoundError):
                now = path.lstat().st_mtime_ns
                if now > used:  # another process has read it
                    self._files[name].used = now
                    heapq.heappush(oldest, (now, name))
                    continue
                path.unlink()
            self.forget(name)
            return True
        return False

    def _is_before(self, entry: StoredEntry, later: StoredEntry) -> bool:
        """Whether the later one's tokens before its own begin in this entry."""
        if entry.key != later.key or not entry.start < min(entry.end, later.start):
            return False
        own, stop = entry.start * TOKEN_BYTES, self._first_block(entry)
        return entry.packed[own:stop] == later.packed[own:stop] and entry.packed[:own] == later.packed[:own]

    def _is_continued(self, entry: StoredEntry) -> bool:
        if entry.start == entry.end:
            return False  # only a state
        first = entry.packed[: self._first_block(entry)]
        same = self._entries[entry.key]
        for packed, name in islice(same, bisect_left(same, (first, "")), None):
            if not packed.startswith(first):
                return False
            other = self._files[name].entry
            if other is not None and other.start > entry.start:
                return True
        return False

    def _first_block(self, entry: StoredEntry) -> int:
        """Bytes of the tokens up to its first block's end, and the one after."""
        return (entry.start + self._block_size + 1) * TOKEN_BYTES
