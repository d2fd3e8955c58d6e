"""One entry of the disk store as a file: a header, then the bytes of its blocks and of its state.

    fixed part | key | tokens | digest of each piece of the payload | zeros up to a page | digest of all this
    payload: the blocks, then the state, in pieces of PIECE_BYTES

The header names everything that the payload's meaning depends on, and its digests cover every byte of the file. Knows
one file: which ones there are, and which of them stay, is the folder's business.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

VERSION = 1
MAGIC = b"SLIPFIX\n"
# magic, version, bytes of the header, fingerprint, block size, bytes of the key, of a block, of a state (as the store
# has them), whether there is a state, start, end
FIXED = struct.Struct("<8sII32sIIQQQQQ")
DIGEST_BYTES = 32  # SHA-256: fast where the processor has instructions for it
TOKEN_BYTES = 4
PAGE = 4096
PIECE_BYTES = 16 << 20  # checked on its own: pieces are read, written and checked side by side
MAX_TOKENS = 1 << 22  # of an entry: a longer one is not ours
MAX_KEY_BYTES = 256
MAX_VIEWS = 512  # in one call of the system, which takes 1024

Unusable = Literal["foreign", "damaged"]  # written for another model, layout or version; not as it was written


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """The blocks of tokens ``start`` to ``end``, and possibly the recurrent state after them."""

    path: Path
    key: str = field(compare=False)  # whose prefixes: a digest
    start: int = field(compare=False)  # the blocks before it are in other entries
    end: int = field(compare=False)
    packed: bytes = field(compare=False, repr=False)  # the tokens, TOKEN_BYTES each
    num_bytes: int = field(compare=False)  # of the file
    has_state: bool = field(compare=False)

    @property
    def tokens(self) -> array[int]:
        """All up to the end, and the one after: end + 1 of them."""
        return array("I", self.packed)


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """What all entries of a store have in common."""

    fingerprint: bytes
    block_size: int
    block_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, fingerprint: str, block_size: int, block_bytes: int, state_bytes: int) -> EntryLayout:
        digest = hashlib.sha256(f"{sys.byteorder} {fingerprint}".encode()).digest()
        return cls(digest, block_size, block_bytes, state_bytes)

    def payload_bytes(self, start: int, end: int, has_state: bool) -> int:
        return (end - start) // self.block_size * self.block_bytes + (self.state_bytes if has_state else 0)

    def header_bytes(self, key: bytes, start: int, end: int, has_state: bool) -> int:
        num_digests = num_pieces(self.payload_bytes(start, end, has_state)) + 1
        used = FIXED.size + len(key) + (end + 1) * TOKEN_BYTES + num_digests * DIGEST_BYTES
        return -(-used // PAGE) * PAGE

    def describe(self, folder: Path, key: str, start: int, end: int, packed: bytes, has_state: bool) -> StoredEntry:
        """An entry and the file that it belongs in. Its name says all that makes it differ from others."""
        name = hashlib.sha256(self.fingerprint + struct.pack("<QQQ", len(key), start, has_state) + key.encode())
        name.update(packed)
        payload = self.payload_bytes(start, end, has_state)
        num_bytes = self.header_bytes(key.encode(), start, end, has_state) + payload
        return StoredEntry(folder / f"{name.hexdigest()}.prefix", key, start, end, packed, num_bytes, has_state)


def num_pieces(payload_bytes: int) -> int:
    return -(-payload_bytes // PIECE_BYTES)


def open_regular(path: Path) -> int:
    """A file to read from. OSError if it is none: neither links nor pipes are followed."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a file")
    return file


# Headers.


def pack_header(entry: StoredEntry, layout: EntryLayout, digests: Sequence[bytes]) -> bytes:
    key = entry.key.encode()
    length = layout.header_bytes(key, entry.start, entry.end, entry.has_state)
    sizes = (layout.block_size, len(key), layout.block_bytes, layout.state_bytes)
    fixed = FIXED.pack(MAGIC, VERSION, length, layout.fingerprint, *sizes, int(entry.has_state), entry.start, entry.end)
    packed = b"".join((fixed, key, entry.packed, *digests)).ljust(length - DIGEST_BYTES, b"\0")
    return packed + hashlib.sha256(packed).digest()


def read_header(file: int, path: Path, layout: EntryLayout) -> tuple[StoredEntry, list[bytes]] | Unusable:
    """The entry and the digests of its pieces. Reads no more than a header of the size that its contents need."""
    fixed = os.pread(file, FIXED.size, 0)
    if len(fixed) < FIXED.size or not fixed.startswith(MAGIC):
        return "damaged"
    _, version, length, fingerprint, block_size, key_bytes, block_bytes, state_bytes, state, start, end = FIXED.unpack(
        fixed
    )
    if version != VERSION:
        return "foreign"
    if EntryLayout(fingerprint, block_size, block_bytes, state_bytes) != layout:
        return "foreign"
    if not (start <= end < MAX_TOKENS and start % block_size == end % block_size == 0 and key_bytes <= MAX_KEY_BYTES):
        return "damaged"
    has_state = state != 0
    if length != layout.header_bytes(bytes(key_bytes), start, end, has_state):
        return "damaged"
    if os.fstat(file).st_size != length + layout.payload_bytes(start, end, has_state):
        return "damaged"  # truncated, most likely
    packed = os.pread(file, length, 0)
    if len(packed) != length or hashlib.sha256(packed[:-DIGEST_BYTES]).digest() != packed[-DIGEST_BYTES:]:
        return "damaged"
    return _parse(packed, path, layout, (key_bytes, start, end, has_state))


def _parse(
    packed: bytes, path: Path, layout: EntryLayout, fields: tuple[int, int, int, bool]
) -> tuple[StoredEntry, list[bytes]] | Unusable:
    key_bytes, start, end, has_state = fields
    tokens_at = FIXED.size + key_bytes
    digests_at = tokens_at + (end + 1) * TOKEN_BYTES
    try:
        key = packed[FIXED.size : tokens_at].decode()
    except UnicodeDecodeError:
        return "damaged"
    entry = layout.describe(path.parent, key, start, end, packed[tokens_at:digests_at], has_state)
    if entry.path != path:
        return "damaged"  # under another entry's name
    count = num_pieces(layout.payload_bytes(start, end, has_state))
    places = [digests_at + i * DIGEST_BYTES for i in range(count)]
    return entry, [packed[place : place + DIGEST_BYTES] for place in places]


# Payloads. Nothing is copied: the system reads from and writes into the caller's memory.


def pieces_of(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in pieces of PIECE_BYTES."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for view in views:
        while len(view):
            piece.append(view[:room])
            room -= len(piece[-1])
            view = view[len(piece[-1]) :]
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def write_entry(
    file: int, entry: StoredEntry, layout: EntryLayout, views: Sequence[memoryview], threads: Executor
) -> None:
    """The payload first; the header, which has its digests, last."""
    start = entry.num_bytes - sum(map(len, views))

    def write(index: int, piece: list[memoryview]) -> bytes:
        _all_of(os.pwritev, file, piece, start + index * PIECE_BYTES)
        return _digest(piece)

    digests = _side_by_side(threads, write, views)
    _all_of(os.pwritev, file, [memoryview(pack_header(entry, layout, digests))], 0)


def read_payload(file: int, entry: StoredEntry, views: Sequence[memoryview], threads: Executor) -> list[bytes]:
    """Fills the views, and returns the digests of what was read. EOFError: the file was cut meanwhile."""
    start = entry.num_bytes - sum(map(len, views))

    def read(index: int, piece: list[memoryview]) -> bytes:
        _all_of(os.preadv, file, piece, start + index * PIECE_BYTES)
        return _digest(piece)

    return _side_by_side(threads, read, views)


def _side_by_side(
    threads: Executor, work: Callable[[int, list[memoryview]], bytes], views: Sequence[memoryview]
) -> list[bytes]:
    jobs = [threads.submit(work, index, piece) for index, piece in enumerate(pieces_of(views))]
    try:
        return [job.result() for job in jobs]
    finally:  # the caller closes the file: nobody may still work on it
        for job in jobs:
            job.cancel()
        wait(jobs)


def _all_of(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, piece: Sequence[memoryview], place: int
) -> None:
    """The system may do less than it was asked for."""
    todo = list(piece)
    while todo:
        done = call(file, todo[:MAX_VIEWS], place)
        if done <= 0:
            raise EOFError
        place += done
        while todo and done >= len(todo[0]):
            done -= len(todo.pop(0))
        if done:
            todo[0] = todo[0][done:]


def _digest(piece: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for view in piece:
        digest.update(view)
    return digest.digest()
