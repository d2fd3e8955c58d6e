"""Files mapped into memory: read when touched, given back on request. Knows no format but that of Git's pointers."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Protocol

import numpy as np

from slipstream.errors import CorruptFile, LoadError

POINTER = b"version https://git-lfs"  # how a text begins that Git keeps in a large file's place


class Reader(Protocol):
    """Reads files in another way than by touching their mapping: see direct_reads.py."""

    def take(self, path: Path, start: int, stop: int) -> np.ndarray | None:
        """These bytes, uint8; None: it does not have them. Valid as long as the array is kept."""
        ...

    def release(self) -> None:
        """What was taken need not be kept for others."""
        ...


class MappedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)  # [file size], read-only
        self.reader: Reader | None = None

    def part(self, start: int, stop: int) -> np.ndarray:
        """uint8 [stop - start]"""
        taken = self.reader.take(self.path, start, stop) if self.reader is not None else None
        return self.data[start:stop] if taken is None else taken

    def release(self) -> None:
        """Takes the pages that were read out of this process's memory; they are read again when needed."""
        if self.reader is not None:
            self.reader.release()
        owner: object = self.data
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if sys.platform == "linux" and isinstance(owner, mmap.mmap):
            owner.madvise(mmap.MADV_DONTNEED)


def refuse_pointer(path: Path, beginning: bytes) -> None:
    if beginning.startswith(POINTER):
        raise LoadError(f"{path} is a Git LFS pointer, not the file itself: `git lfs pull` in its folder fetches that.")


def _map(path: Path) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size == 0:
            raise CorruptFile(f"{path} is empty: fetch it again.")
        data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from error
    refuse_pointer(path, data[: len(POINTER)].tobytes())
    return data
