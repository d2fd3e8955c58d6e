"""Reads what will be needed next into memory of its own, past the system's cache, while others convert weights.

A mapped file goes through the cache: its pages are found, filled, mapped and unmapped one by one, and where model and
file do not both fit into memory they push each other out. That takes as much processor time as packing weights does,
and on a CPU all processors pack (log 256). The mapping is still there for all that is not in the list.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from slipstream.load.mapped_file import MappedFile
from slipstream.load.tensor import Place

AHEAD = 256 << 20  # bytes that were read and that nobody has asked for
LEAST = 1 << 30  # smaller files are read soon enough, and are often in the system's cache
REQUEST = 8 << 20  # bytes
SLACK = 64 << 20  # bytes of memory that are left unused, rather than to take new memory
PAGE = 4096  # what memory, offsets and sizes are multiples of where nothing is in between
SAMPLES = 64  # of a file: is it in the system's cache?


class DirectReads:
    """A context manager, with a thread of its own. Files that are open use it meanwhile. ``places``: in the order in
    which they will be asked for."""

    def __init__(self, files: Sequence[MappedFile], places: Sequence[Place]) -> None:
        self._files = files
        self._places = places
        self._index = {place: at for at, place in enumerate(places)}
        self._moves = threading.Condition()
        self._is_open = True
        self._found: dict[int, np.ndarray | None] = {}  # None: it could not be read this way
        self._taken: set[int] = set()  # of those in _found
        self._num_done = 0  # places
        self._wanted = -1  # the furthest place that was asked for
        self._unclaimed = 0  # bytes
        self._memory = _Memory()
        self._thread = threading.Thread(target=self._run, name="direct-reads", daemon=True)

    def __enter__(self) -> DirectReads:
        for file in self._files:
            file.reader = self
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.reader = None
        with self._moves:
            self._is_open = False
            self._moves.notify_all()
        self._thread.join()
        self._found.clear()
        self._memory.close()

    def take(self, path: Path, start: int, stop: int) -> np.ndarray | None:
        at = self._index.get(Place(path, start, stop))
        if at is None:
            return None
        with self._moves:
            self._wanted = max(self._wanted, at)
            self._moves.notify_all()
            self._moves.wait_for(lambda: at < self._num_done or not self._is_open)
            found = self._found.get(at)
            if found is not None and at not in self._taken:
                self._taken.add(at)
                self._unclaimed -= len(found)
                self._moves.notify_all()
            return found

    def release(self) -> None:
        with self._moves:
            for at in self._taken:
                del self._found[at]
            self._taken.clear()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:  # whatever happened: nobody waits for this thread any more
            with self._moves:
                self._is_open = False
                self._moves.notify_all()

    def _read_all(self) -> None:
        with _Descriptors() as descriptors:
            for at, place in enumerate(self._places):
                if not self._may_read(at, place.stop - place.start):
                    return
                found: np.ndarray | None = None
                with suppress(OSError):  # whoever needs it reads the mapping, and says what is wrong
                    found = self._memory.read(descriptors.of(place.path), place.start, place.stop)
                with self._moves:
                    self._found[at] = found
                    self._num_done = at + 1
                    self._unclaimed += 0 if found is None else len(found)
                    self._moves.notify_all()

    def _may_read(self, at: int, num_bytes: int) -> bool:
        """Once there is room, or somebody waits for it. False: nobody reads any more."""

        def has_room() -> bool:
            return self._unclaimed == 0 or self._unclaimed + num_bytes <= AHEAD

        with self._moves:
            self._moves.wait_for(lambda: at <= self._wanted or has_room() or not self._is_open)
            return self._is_open


class _Descriptors:
    """Files opened for reading past the cache, each once."""

    def __init__(self) -> None:
        self._opened: dict[Path, int] = {}

    def of(self, path: Path) -> int:
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        return self._opened[path]

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)


class _Memory:
    """For what is read, used again once no array of it is left: pages that are new to the process cost more time than
    the file's bytes (log 256)."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # the one that was used last comes last; AHEAD bytes at most
        self._lock = threading.RLock()  # an array may end anywhere, also in here
        self._is_open = True

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._free.clear()

    def read(self, descriptor: int, start: int, stop: int) -> np.ndarray:
        """uint8 [stop - start], read-only"""
        first = start // PAGE * PAGE
        size = -(-(stop - first) // PAGE) * PAGE
        memory = self._of(size)
        done, view = 0, memoryview(memory)
        while done < stop - first:
            num_read = os.preadv(descriptor, [view[done : min(done + REQUEST, size)]], first + done)
            if num_read == 0:
                raise OSError("the file has become shorter")
            done += num_read
        found = np.frombuffer(memory, np.uint8, stop - start, start - first)
        found.flags.writeable = False
        weakref.finalize(found, self._take_back, memory).atexit = False
        return found

    def _of(self, size: int) -> mmap.mmap:
        """The smallest that fits, if it is not far too large."""
        with self._lock:
            fitting = [memory for memory in self._free if size <= len(memory) <= size + SLACK]
            if fitting:
                found = min(fitting, key=len)
                self._free.remove(found)
                return found
        made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a system without large pages
            made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def _take_back(self, memory: mmap.mmap) -> None:
        """In whichever thread the last array ends."""
        with self._lock:
            if self._is_open:
                self._free.append(memory)
            while sum(map(len, self._free)) > AHEAD:
                del self._free[0]


@contextmanager
def reading_directly(files: Sequence[MappedFile], places: Sequence[Place]) -> Iterator[None]:
    """Where it is worth it and the system can."""
    if not is_worth_it(files):
        yield
        return
    with DirectReads(files, places):
        yield


def is_worth_it(files: Sequence[MappedFile]) -> bool:
    """Large, and for the most part not in the system's cache already."""
    total = sum(len(file.data) for file in files)
    return total >= LEAST and 2 * sum(len(file.data) * _cached_share(file) for file in files) < total


def read_ahead_bytes(files: Sequence[MappedFile]) -> int:
    """Memory for what was read and not yet asked for, and as much that waits to be used again; 0: not worth it."""
    return 2 * AHEAD if sum(len(file.data) for file in files) >= LEAST else 0


def _cached_share(file: MappedFile) -> float:
    """By samples. 1 also if the system cannot be asked, or reads nothing past its cache."""
    try:
        os.close(os.open(file.path, os.O_RDONLY | os.O_DIRECT))
        with file.path.open("rb", buffering=0) as opened:
            asked = [_is_at_hand(opened.fileno(), len(file.data) * at // SAMPLES) for at in range(SAMPLES)]
    except (OSError, AttributeError):
        return 1.0
    return sum(asked) / SAMPLES


def _is_at_hand(descriptor: int, offset: int) -> bool:
    """Whether a byte can be read without the disk."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
