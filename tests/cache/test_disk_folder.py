"""The folder of a disk store: what goes when it is full, what killed writers leave, and what others put there."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_entries import BLOCK_BYTES, KEY, STATE_BYTES, get, names, open_store, put

from slipstream.cache import disk_folder, disk_store, entry_file
from slipstream.cache.entry_file import FIXED, PAGE, StoredEntry

ONE = PAGE + BLOCK_BYTES + STATE_BYTES  # bytes of an entry of one block
NAME = "0" * 64 + ".prefix"


def must(entry: StoredEntry | None) -> StoredEntry:
    assert entry is not None
    return entry


# ---- the limit ----


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=3 * ONE)
    first, second, third = (must(put(store, [n, n, n])) for n in range(3))
    assert store.num_bytes == 3 * ONE
    assert get(store, first)
    fourth = must(put(store, [9, 9, 9]))
    assert names(tmp_path) == {entry.path.name for entry in (first, third, fourth)}
    assert not get(store, second)
    assert store.num_bytes == 3 * ONE == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_recency_outlives_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = must(put(store, [1, 1, 1])), must(put(store, [2, 2, 2]))
    assert get(store, first)
    third = must(put(open_store(tmp_path, max_bytes=2 * ONE), [3, 3, 3]))
    assert names(tmp_path) == {first.path.name, third.path.name}
    assert not get(store, second)


@pytest.mark.parametrize("again", [False, True], ids=["same store", "reopened"])
def test_what_is_continued_stays(tmp_path: Path, again: bool) -> None:
    """A chain of three, the beginning the oldest, and a shorter prompt that is newer than all."""
    store = open_store(tmp_path, max_bytes=4 * ONE)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    chain = [must(put(store, tokens[: start + 3], start)) for start in (0, 2, 4)]
    lone = must(put(store, [9, 9, 9]))
    if again:
        store = open_store(tmp_path, max_bytes=4 * ONE)
    gone = [chain[2], chain[1], chain[0], lone]
    for number, victim in enumerate(gone):
        put(store, [20 + number] * 3, key="another")
        assert not victim.path.exists(), number
        assert all(entry.path.exists() for entry in gone[number + 1 :])


def test_a_branch_in_the_middle_of_an_entry_needs_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=3 * PAGE)
    trunk = must(put(store, [1, 2, 3, 4, 5, 6, 7], state=False))
    branch = must(put(store, [1, 2, 3, 4, 8, 8, 8], start=4, state=False))
    put(store, [0, 0, 0], state=False)
    assert not branch.path.exists()
    assert trunk.path.exists()


def test_another_continuation_does_not_count(tmp_path: Path) -> None:
    """The same first tokens but for the one after the block: it is another block."""
    store = open_store(tmp_path, max_bytes=3 * ONE)
    first = must(put(store, [1, 2, 3]))
    put(store, [1, 2, 4, 5, 6], start=2)
    put(store, [1, 2, 3, 5, 6], start=2, key="another")
    put(store, [9, 9, 9])
    assert not first.path.exists()


def test_a_new_entry_does_not_push_out_what_it_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path, max_bytes=2 * ONE)
    first = must(put(store, [1, 2, 3]))
    other = must(put(store, [8, 8, 8]))
    second = must(put(store, [1, 2, 3, 4, 5], start=2))
    assert names(tmp_path) == {first.path.name, second.path.name}, "the older one stays"
    assert not get(store, other)
    assert put(store, [1, 2, 3, 4, 5, 6, 7], start=4) is None
    assert names(tmp_path) == {first.path.name, second.path.name}, "nothing is given up in vain"
    assert "no room for a prompt of 6 tokens" in caplog.text


def test_an_entry_larger_than_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path, max_bytes=2 * ONE)
    kept = must(put(store, [1, 1, 1]))
    long = list(range(201))
    assert put(store, long) is None
    assert put(store, long) is None
    assert names(tmp_path) == {kept.path.name}
    assert len(caplog.records) == 1
    assert put(store, [2, 2, 2]) is not None, "others are still written"


def test_other_models_and_processes_share_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = open_store(tmp_path, "one", max_bytes=3 * ONE), open_store(tmp_path, "two", max_bytes=3 * ONE)
    entries = [must(put(store, [n] * 3)) for n, store in enumerate((one, two, one))]
    monkeypatch.setattr(disk_store, "SCAN_SECONDS", 0.0)
    one._next_scan = two._next_scan = 0.0
    assert get(one, entries[0])
    new = must(put(two, [7, 7, 7]))
    assert names(tmp_path) == {entry.path.name for entry in (entries[0], entries[2], new)}


def test_what_another_process_has_just_read_is_not_old(tmp_path: Path) -> None:
    one, two = open_store(tmp_path, max_bytes=2 * ONE), open_store(tmp_path)
    first, second = must(put(one, [1, 1, 1])), must(put(one, [2, 2, 2]))
    assert get(two, first)
    put(one, [3, 3, 3])
    assert first.path.exists()
    assert not second.path.exists()


# ---- killed writers ----

WRITER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from disk_entries import open_store, put
from slipstream.cache import entry_file
entry_file.PIECE_BYTES = 64
store, write, calls = open_store(Path(sys.argv[1])), os.pwritev, []
def slow(*args):
    done = write(*args)
    calls.append(done)
    if len(calls) == 3:
        print("half", flush=True)
        time.sleep(600)
    return done
os.pwritev = slow
put(store, list(range(101)))
"""


@contextmanager
def half_written(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written a part of an entry."""
    args = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        try:
            yield writer
        finally:
            writer.kill()


def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    with half_written(tmp_path) as writer:
        [half] = tmp_path.iterdir()
        assert half.stat().st_size > 0
        assert half.suffix == ".tmp"
        store = open_store(tmp_path)
        assert store.open() == []
        assert half.exists(), "its writer lives"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert half.exists()
    assert store.open() == []
    assert names(tmp_path) == set()


def test_a_file_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that opens the folder takes it for a dead writer's."""
    import fcntl

    lock, removed = fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(file, how)

    store = open_store(tmp_path)
    monkeypatch.setattr(fcntl, "flock", late)
    assert get(store, must(put(store, [1, 2, 3])))
    assert removed[0].suffix == ".tmp"


LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from disk_entries import open_store, put
store = open_store(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
assert put(store, list(range(11))) is not None
assert put(store, list(range(201))) is None
"""


def test_the_system_refuses_to_write_more(tmp_path: Path) -> None:
    """A real refusal in the middle of a file, by the limit on its size."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] in (resource.RLIM_INFINITY, 6000)
    args = [sys.executable, "-c", LIMITED, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(args, check=True, capture_output=True, text=True)
    assert "File too large" in done.stderr
    [entry] = open_store(tmp_path).open()
    assert names(tmp_path) == {entry.path.name}


def test_without_locks_temporary_files_go_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    old, new = (tmp_path / f"{NAME}.{digit * 16}.tmp" for digit in "ab")
    old.touch()
    new.touch()
    an_hour_ago = time.time() - disk_store.STALE_SECONDS - 1
    os.utime(old, (an_hour_ago, an_hour_ago))
    store = open_store(tmp_path)
    assert names(tmp_path) == {new.name}
    assert put(store, [1, 2, 3]) is not None


# ---- anything in the folder ----


def header(path: Path, **changes: int) -> bytes:
    """The fixed part of a header that this store would take for its own."""
    layout = open_store(path.parent)._layout
    fields = {"length": PAGE, "key": len(KEY), "state": 0, "start": 0, "end": 4, **changes}
    return FIXED.pack(
        *(entry_file.MAGIC, entry_file.VERSION, fields["length"], layout.fingerprint, layout.block_size),
        *(fields["key"], layout.block_bytes, layout.state_bytes, fields["state"], fields["start"], fields["end"]),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"length": 2**32 - 1},
        {"end": 2**63, "length": 2**32 - 1},
        {"end": 4 << 20},
        {"start": 6},
        {"end": 3},
        {"key": 2**32 - 1},
        {"state": 2**64 - 1},
    ],
    ids=str,
)
def test_headers_that_ask_for_much(tmp_path: Path, changes: dict[str, int]) -> None:
    path = tmp_path / NAME
    path.write_bytes(header(path, **changes))
    os.truncate(path, 1 << 40)  # a hole: so much that a header of any length is there
    store = open_store(tmp_path)
    assert store.ignored["damaged"] == 1
    assert store.open() == []


def test_a_header_of_a_gigabyte_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, end, key = tmp_path / NAME, 1 << 28, KEY.encode()
    layout = open_store(tmp_path)._layout
    length = layout.header_bytes(key, 0, end, False)
    path.write_bytes(header(path, length=length, end=end))
    os.truncate(path, length + layout.payload_bytes(0, end, False))  # all that it claims is there
    asked, read = [0], os.pread

    def watched(file: int, count: int, place: int) -> bytes:
        asked.append(count)
        return read(file, min(count, 1 << 20), place)

    monkeypatch.setattr(os, "pread", watched)
    assert open_store(tmp_path).ignored["damaged"] == 1
    assert max(asked) < 1 << 25 < length


def test_what_is_no_file(tmp_path: Path) -> None:
    entry = must(put(open_store(tmp_path), [1, 2, 3]))
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    entry.path.rename(elsewhere)
    names_ = [f"{digit * 64}.prefix{end}" for digit in "abc" for end in ("", f".{'0' * 16}.tmp")]
    for name in names_[:2]:
        (tmp_path / name).mkdir()
    for name in names_[2:4]:
        os.mkfifo(tmp_path / name)
    for name in names_[4:]:
        (tmp_path / name).symlink_to(elsewhere)
    entry.path.symlink_to(elsewhere)
    store = open_store(tmp_path, max_bytes=2 * ONE)
    assert store.ignored["not a file"] == len(names_) + 1
    assert store.num_bytes == 0
    assert not get(store, entry)
    assert put(store, [7, 7, 7]) is not None
    assert set(names_) < names(tmp_path), "nothing of this is removed"


def test_a_pipe_in_the_place_of_an_entry(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = must(put(store, [1, 2, 3]))
    entry.path.unlink()
    os.mkfifo(entry.path)
    assert not get(store, entry)


def test_strangers_files_are_never_touched(tmp_path: Path) -> None:
    strangers = ("notes.txt", "a.prefix", "0" * 64, f"{'G' * 64}.prefix", "x.tmp", f"{NAME}.tmp")
    for name in strangers:
        (tmp_path / name).write_bytes(bytes(100 * ONE))
    store = open_store(tmp_path, max_bytes=ONE)
    for n in range(3):
        put(store, [n, n, n])
    assert len(names(tmp_path)) == len(strangers) + 1
    assert store.ignored.total() == 0


def test_garbage_under_an_entrys_name_counts_and_goes_by_age(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(os.urandom(ONE))
    store = open_store(tmp_path, max_bytes=2 * ONE)
    assert (store.ignored["damaged"], store.num_bytes) == (1, ONE)
    put(store, [1, 1, 1])
    assert (tmp_path / NAME).exists()
    put(store, [2, 2, 2])
    assert not (tmp_path / NAME).exists()


def test_more_files_than_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    for n in range(20):
        put(store, [n, n, n])
    with monkeypatch.context() as patch:
        patch.setattr(disk_folder, "MAX_FILES", 5)
        assert len(open_store(tmp_path).open()) == 5
    with monkeypatch.context() as patch:
        patch.setattr(disk_folder, "MAX_NAMES", 7)
        assert len(open_store(tmp_path).open()) == 7
    monkeypatch.setattr(disk_store, "MAX_INDEX_BYTES", 3 * struct.calcsize("<III"))
    store = open_store(tmp_path)
    assert store.ignored["too many"] == 16
    assert store.num_bytes == 20 * ONE, "they count, though they are not read"
