"""Files mapped into memory: read when touched, given back on request. Knows no format."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np

from slipstream.errors import CorruptFile, LoadError


def map_file(path: Path) -> np.ndarray:
    """The file's bytes as a read-only uint8 array, mapped and not read."""
    try:
        size = path.stat().st_size
        if size == 0:
            raise CorruptFile(f"{path} is empty.")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from error


def release_pages(data: np.ndarray) -> None:
    """Takes the pages of a mapped file out of this process's memory; they are read again when needed."""
    owner: object = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if sys.platform == "linux" and isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)
