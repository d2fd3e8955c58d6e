"""Cached prefixes in a folder: they outlive the process, and several processes may share them.

An entry is a file of its own, whole or not there: written under another name, then renamed. Nothing is locked but files
that are being written. A file that is missing, foreign or damaged is a miss. Knows no tree and no device: callers hand
in the bytes of blocks and states.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

from slipstream.cache.disk_folder import DiskFolder
from slipstream.cache.entry_file import (
    MAX_KEY_BYTES,
    MAX_TOKENS,
    EntryLayout,
    StoredEntry,
    open_regular,
    read_header,
    read_payload,
    write_entry,
)
from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

THREADS = 8  # that read, write and check pieces; nearly all of it happens outside of Python
PAUSE_SECONDS = 60.0  # without writing, after it failed
SCAN_SECONDS = 30.0  # after which the folder is looked at again: others write there, too
STALE_SECONDS = 3600.0  # for temporary files where the system has no locks
MAX_INDEX_BYTES = 512 << 20  # of tokens that are held for the entries of the folder


def make_folder(path: Path) -> None:
    """ConfigError: it cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.scandir(path).close()
    except OSError as error:
        raise ConfigError(f"cache_dir: {path} cannot be used as a folder: {error.strerror}") from error


class DiskStore:
    """For several threads at once."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        *,
        block_size: int,
        block_bytes: int,
        state_bytes: int,
        max_bytes: int | None,
    ) -> None:
        """``fingerprint``: of all that the bytes of a block depend on.

        ``max_bytes``: of the folder; None: what the disk has. A disk that is full limits it as well.
        """
        self._layout = EntryLayout.of(fingerprint, block_size, block_bytes, state_bytes)
        self._path = folder
        self._folder = DiskFolder(folder, block_size)
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="cache-disk")
        self._lock = Lock()  # of the folder's index
        self._next_scan = 0.0
        self._paused_until = 0.0
        self._warned: set[str] = set()
        self.ignored: Counter[str] = Counter()  # files, by reason: foreign, damaged, not a file, too many

    @property
    def num_bytes(self) -> int:
        """In the folder, as far as is known: other models' entries count as well."""
        return self._folder.num_bytes

    def close(self) -> None:
        self._threads.shutdown()

    # Opening.

    def open(self) -> list[StoredEntry]:
        """All entries that can be used, an entry after those that it continues. Reads no payloads.

        ConfigError: the folder cannot be used. Those that an entry continues may be missing.
        """
        self._make_folder()
        found: list[StoredEntry] = []
        num_bytes = 0
        with self._lock:
            names, temporary, num_others = self._scan()
            self.ignored["not a file"] += num_others
            for name in temporary:
                self._remove_if_dead(self._path / name)
            for name in names:
                if num_bytes > MAX_INDEX_BYTES:
                    self.ignored["too many"] += 1
                    continue
                entry = self._read_entry(self._path / name)
                if entry is not None:
                    num_bytes += len(entry.packed)
                    found.append(entry)
                    self._folder.add(entry)
        return sorted(found, key=lambda entry: entry.start)

    def _make_folder(self) -> None:
        make_folder(self._path)
        if self._path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._warn("mode", "others may write to %s: what they put there would be taken for cached", self._path)

    def _read_entry(self, path: Path) -> StoredEntry | None:
        try:
            file = open_regular(path)
        except OSError:
            self.ignored["not a file"] += 1
            return None
        try:
            header = read_header(file, path, self._layout)
        except OSError:
            header = "damaged"
        finally:
            os.close(file)
        if isinstance(header, str):
            self.ignored[header] += 1
            return None
        return header[0]

    def _remove_if_dead(self, path: Path) -> None:
        """A temporary file whose writer has ended. A writer holds a lock as long as it lives."""
        with suppress(OSError):
            file = open_regular(path)
            try:
                dead = time.time() - os.fstat(file).st_mtime > STALE_SECONDS
                with suppress(OSError):  # no locks in this file system
                    dead = _lock_now(file)
                if dead:
                    path.unlink()
            finally:
                os.close(file)

    # Writing.

    def describe(self, key: str, start: int, tokens: Sequence[int], has_state: bool) -> StoredEntry:
        """The entry that `write` would make of these."""
        return self._layout.describe(self._path, key, start, len(tokens) - 1, array("I", tokens).tobytes(), has_state)

    def touch(self, entry: StoredEntry) -> None:
        """It was used, if only in memory: it goes later."""
        with self._lock:
            self._folder.add(entry, self._touch(entry))

    def write(
        self, key: str, start: int, tokens: Sequence[int], blocks: Sequence[memoryview], state: memoryview | None
    ) -> StoredEntry | None:
        """The blocks after the first ``start`` tokens, and the state after them. ``tokens``: all, and the one after.

        There may be a state without blocks. None: it cannot be written, now or at all; the log says why, once.
        """
        end = start + len(blocks) * self._layout.block_size
        assert len(tokens) == end + 1 <= MAX_TOKENS
        assert start % self._layout.block_size == 0
        assert blocks or state is not None
        assert len(key.encode()) <= MAX_KEY_BYTES
        views = self._views(blocks, state)
        if time.monotonic() < self._paused_until:
            return None
        entry = self.describe(key, start, tokens, state is not None)
        try:
            if not self._is_there(entry):
                if not self._make_room(entry):
                    return None
                self._write_file(entry, views)
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            reason = error.strerror or str(error)
            self._warn("write", "%s cannot be written to (%s): prompts are not stored until it can", self._path, reason)
            return None
        self._warned.discard("write")
        with self._lock:
            self._folder.add(entry, self._touch(entry))
        return entry

    def _views(self, blocks: Sequence[memoryview], state: memoryview | None) -> list[memoryview]:
        """As plain bytes. They are not copied, so their memory has to be in one piece."""
        views = [memoryview(block).cast("B") for block in blocks]
        assert all(len(view) == self._layout.block_bytes for view in views)
        if state is not None:
            views.append(memoryview(state).cast("B"))
            assert len(views[-1]) == self._layout.state_bytes
        return views

    def _is_there(self, entry: StoredEntry) -> bool:
        """Written before, or by another process. A damaged one is found when it is read."""
        try:
            seen = entry.path.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(seen.st_mode) and seen.st_size == entry.num_bytes

    def _make_room(self, entry: StoredEntry) -> bool:
        with self._lock:
            if time.monotonic() >= self._next_scan:
                self._scan()
            space = os.statvfs(self._path)
            limit = self._folder.num_bytes + space.f_bavail * space.f_frsize
            if self._max_bytes is not None:
                limit = min(limit, self._max_bytes)
            needed = self._folder.bytes_before(entry) + entry.num_bytes
            if needed > limit:
                text = "%s has no room for a prompt of %d tokens: %.1f MB are needed, %.1f MB are allowed or free"
                self._warn("room", text, self._path, entry.end, needed / 1e6, limit / 1e6)
                return False
            while self._folder.num_bytes + entry.num_bytes > limit:
                if not self._folder.remove_oldest(entry):
                    return False
        return True

    def _scan(self) -> tuple[list[str], list[str], int]:
        self._next_scan = time.monotonic() + SCAN_SECONDS
        return self._folder.scan()

    def _write_file(self, entry: StoredEntry, views: Sequence[memoryview]) -> None:
        file, path = self._temporary_file(entry)
        try:
            write_entry(file, entry, self._layout, views, self._threads)
            os.fsync(file)
            os.rename(path, entry.path)
        except BaseException as error:
            with suppress(OSError):
                path.unlink()
            if isinstance(error, EOFError):
                raise OSError("nothing more could be written") from error
            raise
        finally:
            os.close(file)

    def _temporary_file(self, entry: StoredEntry) -> tuple[int, Path]:
        """A new file that only its owner may read, locked while it is written: see _remove_if_dead."""
        import fcntl

        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path = entry.path.with_name(f"{entry.path.name}.{os.urandom(8).hex()}.tmp")
            file = os.open(path, flags, 0o600)
            with suppress(OSError):  # no locks in this file system
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file, path
            os.close(file)  # taken for a dead one before it was locked

    # Reading.

    def read(self, entry: StoredEntry, blocks: Sequence[memoryview], state: memoryview | None) -> bool:
        """Fills memory with an entry. False: a miss, and there may be anything in that memory.

        A file that is not as it was written is removed.
        """
        views = self._views(blocks, state)
        assert len(blocks) * self._layout.block_size == entry.end - entry.start
        assert (state is not None) == entry.has_state
        try:
            file = open_regular(entry.path)
        except OSError:
            self._forget(entry)
            return False
        try:
            header = read_header(file, entry.path, self._layout)
            whole = not isinstance(header, str) and read_payload(file, entry, views, self._threads) == header[1]
        except (OSError, EOFError):
            whole = False
        finally:
            os.close(file)
        if not whole:
            self._warn("damaged", "%s is damaged and was removed: its prompt is computed again", entry.path)
            self.ignored["damaged"] += 1
            self.remove(entry)
            return False
        with self._lock:
            self._folder.add(entry, self._touch(entry))
        return True

    def remove(self, entry: StoredEntry) -> None:
        with suppress(OSError):
            entry.path.unlink()
        self._forget(entry)

    def _forget(self, entry: StoredEntry) -> None:
        with self._lock:
            self._folder.forget(entry.path.name)

    def _touch(self, entry: StoredEntry) -> int:
        """It was used now: others see that by its file's time."""
        now = time.time_ns()
        with suppress(OSError):
            os.utime(entry.path, ns=(now, now), follow_symlinks=False)
        return now

    def _warn(self, kind: str, text: str, *values: object) -> None:
        """Once, until it was well again."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("prefix cache: " + text, *values)


def _lock_now(file: int) -> bool:
    """False: another process has locked it. OSError where there are no locks."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
