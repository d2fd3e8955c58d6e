"""A small disk store for tests: two tokens a block, a few bytes each, contents that follow from the tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.cache.disk_store import DiskStore
from slipstream.cache.entry_file import StoredEntry

BLOCK_SIZE, BLOCK_BYTES, STATE_BYTES = 2, 48, 100
KEY = "whose"


def open_store(folder: Path, fingerprint: str = "model", **options: Any) -> DiskStore:
    sizes = {"block_size": BLOCK_SIZE, "block_bytes": BLOCK_BYTES, "state_bytes": STATE_BYTES, "max_bytes": None}
    store = DiskStore(folder, fingerprint, **{**sizes, **options})
    store.open()
    return store


def content(tokens: Sequence[int], place: int, num_bytes: int) -> bytes:
    return random.Random(f"{list(tokens)} {place}").randbytes(num_bytes)


def put(
    store: DiskStore, tokens: Sequence[int], start: int = 0, state: bool = True, key: str = KEY
) -> StoredEntry | None:
    """``tokens``: those of the blocks, and the one after."""
    places = range(start, len(tokens) - 1, BLOCK_SIZE)
    blocks = [memoryview(content(tokens[: place + 3], place, BLOCK_BYTES)) for place in places]
    kept = memoryview(content(tokens, -1, STATE_BYTES)) if state else None
    return store.write(key, start, tokens, blocks, kept)


def get(store: DiskStore, entry: StoredEntry) -> bool:
    """Whether it can be read; what was read is right."""
    places = range(entry.start, entry.end, BLOCK_SIZE)
    blocks = [memoryview(bytearray(BLOCK_BYTES)) for _ in places]
    state = memoryview(bytearray(STATE_BYTES)) if entry.has_state else None
    if not store.read(entry, blocks, state):
        return False
    tokens = entry.tokens
    for place, block in zip(places, blocks, strict=True):
        assert block == content(tokens[: place + 3], place, BLOCK_BYTES)
    assert state is None or state == content(tokens, -1, STATE_BYTES)
    return True


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
