"""Files mapped into memory: read when touched, given back on request. Knows no format but that of Git's pointers."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np

from slipstream.errors import CorruptFile, LoadError

POINTER = b"version https://git-lfs"  # how a text begins that Git keeps in a large file's place


def refuse_pointer(path: Path, beginning: bytes) -> None:
    if beginning.startswith(POINTER):
        raise LoadError(f"{path} is a Git LFS pointer, not the file itself: `git lfs pull` in its folder fetches that.")


def map_file(path: Path) -> np.ndarray:
    """The file's bytes as a read-only uint8 array, mapped and not read."""
    try:
        size = path.stat().st_size
        if size == 0:
            raise CorruptFile(f"{path} is empty.")
        data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from error
    refuse_pointer(path, data[: len(POINTER)].tobytes())
    return data


def release_pages(data: np.ndarray) -> None:
    """Takes the pages of a mapped file out of this process's memory; they are read again when needed."""
    owner: object = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if sys.platform == "linux" and isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)
