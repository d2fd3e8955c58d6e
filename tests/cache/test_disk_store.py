"""The disk store: what was written is read back or is a miss, and the folder stays clean and within its limit."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_entries import BLOCK_BYTES, KEY, STATE_BYTES, get, names, open_store, put

from slipstream.cache import disk_store, entry_file
from slipstream.cache.disk_store import DiskStore
from slipstream.cache.entry_file import PAGE, StoredEntry
from slipstream.errors import ConfigError

PROMPT = [5, 6, 7, 8, 9]  # two blocks, and the token after
Log = pytest.LogCaptureFixture


def must(entry: StoredEntry | None) -> StoredEntry:
    assert entry is not None
    return entry


def reopened(folder: Path, **options: Any) -> list[StoredEntry]:
    return open_store(folder, **options).open()


# ---- what comes back ----


@pytest.mark.parametrize("state", [False, True])
def test_an_entry_outlives_its_store(tmp_path: Path, state: bool) -> None:
    entry = must(put(open_store(tmp_path), PROMPT, state=state))
    [found] = reopened(tmp_path)
    assert found == entry
    assert (found.key, found.start, found.end, list(found.tokens)) == (KEY, 0, 4, PROMPT)
    assert found.has_state is state
    assert found.num_bytes == found.path.stat().st_size == PAGE + 2 * BLOCK_BYTES + state * STATE_BYTES
    assert get(open_store(tmp_path), found)


@pytest.mark.parametrize("piece", [1, 7, BLOCK_BYTES, 100, 10_000])
def test_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(entry_file, "PIECE_BYTES", piece)
    monkeypatch.setattr(entry_file, "MAX_VIEWS", 3)
    store = open_store(tmp_path)
    assert get(store, must(put(store, list(range(41)))))


def test_the_system_may_write_and_read_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(call: Callable[..., int]) -> Callable[..., int]:
        return lambda file, views, place: call(file, [views[0][:5]], place)

    monkeypatch.setattr(os, "pwritev", few(os.pwritev))
    monkeypatch.setattr(os, "preadv", few(os.preadv))
    store = open_store(tmp_path)
    assert get(store, must(put(store, PROMPT)))


def test_memory_of_any_shape(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    numbers = memoryview(bytearray(range(2 * BLOCK_BYTES))).cast("I", (2, 6, 2))
    blocks = [memoryview(bytes(numbers)[:BLOCK_BYTES]).cast("H", (4, 6)), memoryview(bytes(BLOCK_BYTES))]
    entry = must(store.write(KEY, 0, PROMPT, blocks, None))
    back = [memoryview(bytearray(BLOCK_BYTES)).cast("I", (3, 4)) for _ in range(2)]
    assert store.read(entry, back, None)
    assert bytes(back[0]) == bytes(range(BLOCK_BYTES))


def test_other_start_state_key_and_tokens_are_other_entries(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = [
        put(store, PROMPT),
        put(store, PROMPT, state=False),
        put(store, PROMPT, start=2),
        put(store, PROMPT, start=4),  # only the state
        put(store, PROMPT, key="another"),
        put(store, [*PROMPT[:-1], 10]),
    ]
    assert len({must(entry).path for entry in made}) == len(made)
    assert all(get(store, must(entry)) for entry in made)
    assert len(reopened(tmp_path)) == len(made)


def test_those_that_are_continued_come_first(tmp_path: Path) -> None:
    store, tokens = open_store(tmp_path), list(range(21))
    for start in (16, 8, 12, 0, 4):
        put(store, tokens[: start + 5], start)
    assert [entry.start for entry in reopened(tmp_path)] == [0, 4, 8, 12, 16]


def test_the_key_is_kept_the_fingerprint_is_not(tmp_path: Path) -> None:
    entry = must(put(open_store(tmp_path, "secret model"), PROMPT))
    assert KEY.encode() in entry.path.read_bytes()
    assert b"secret" not in entry.path.read_bytes()


# ---- misses ----


def test_one_changed_byte_anywhere_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    monkeypatch.setattr(entry_file, "PIECE_BYTES", 64)
    store = open_store(tmp_path)
    entry = must(put(store, PROMPT))
    good = entry.path.read_bytes()
    places = [*range(300), *range(300, PAGE - 64, 97), *range(PAGE - 64, len(good))]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        entry.path.write_bytes(bad)
        assert not get(store, entry), place
        assert not entry.path.exists()
        if place < PAGE:
            entry.path.write_bytes(bad)
            assert reopened(tmp_path) == [], place
    entry.path.write_bytes(good)
    assert get(store, entry)
    warnings = [record for record in caplog.records if "damaged" in record.message]
    assert len(warnings) == 1, "it is said once"


def test_a_cut_or_grown_file_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = must(put(store, PROMPT))
    good = entry.path.read_bytes()
    for bad in (good[:-1], good + b"\0", good[:PAGE], good[:50], b"", good[:-1] + b"\0\0"):
        entry.path.write_bytes(bad)
        assert reopened(tmp_path) == []
        assert entry.path.exists(), "opening removes nothing"
        assert not get(store, entry)


def test_a_file_that_is_cut_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    entry = must(put(store, PROMPT))
    read = os.preadv

    def cut(file: int, views: Any, place: int) -> int:
        os.truncate(entry.path, PAGE + 10)
        return read(file, views, place)

    monkeypatch.setattr(os, "preadv", cut)
    assert not get(store, entry)


def test_an_entry_under_another_ones_name_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, two = must(put(store, PROMPT)), must(put(store, [1, 2, 3]))
    one.path.write_bytes(two.path.read_bytes())
    assert reopened(tmp_path) == [two]
    assert not get(store, one)


@pytest.mark.parametrize(
    "other", [{"fingerprint": "m2"}, {"block_bytes": 64}, {"block_size": 4}, {"state_bytes": 104}], ids=str
)
def test_what_was_written_for_another_model_is_ignored(tmp_path: Path, other: dict[str, Any]) -> None:
    entry = must(put(open_store(tmp_path), PROMPT))
    store = open_store(tmp_path, **other)
    assert store.ignored == {"foreign": 1, "not a file": 0}
    assert reopened(tmp_path, **other) == []
    assert reopened(tmp_path) == [entry], "it is still there for its own"


def test_another_version_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(open_store(tmp_path), PROMPT)
    monkeypatch.setattr(entry_file, "VERSION", 2)
    assert open_store(tmp_path).ignored["foreign"] == 1


def test_a_file_that_vanished_is_a_miss(tmp_path: Path, caplog: Log) -> None:
    store = open_store(tmp_path)
    entry = must(put(store, PROMPT))
    entry.path.unlink()
    assert not get(store, entry)
    assert store.num_bytes == 0
    assert not caplog.records
    store.remove(entry)


def test_remove(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.remove(must(put(store, PROMPT)))
    assert names(tmp_path) == set()
    assert store.num_bytes == 0


# ---- whose files ----


def test_only_the_owner_may_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = set()
    write = os.pwritev

    def watched(file: int, *rest: Any) -> int:
        modes.add(stat.S_IMODE(os.fstat(file).st_mode))
        return write(file, *rest)

    monkeypatch.setattr(os, "pwritev", watched)
    before = os.umask(0)
    try:
        entry = must(put(open_store(tmp_path / "new" / "folder"), PROMPT))
    finally:
        os.umask(before)
    assert modes == {0o600}
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(entry.path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_to_is_said(tmp_path: Path, caplog: Log) -> None:
    tmp_path.chmod(0o700)
    open_store(tmp_path)
    assert not caplog.records
    tmp_path.chmod(0o777)
    open_store(tmp_path)
    assert "others may write" in caplog.text


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be used as a folder"):
            open_store(path)


# ---- disks that fail ----


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0) -> list[int]:
    """The system's call fails from the given time on."""
    real, calls = getattr(os, name), [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.parametrize(("name", "after"), [("pwritev", 0), ("pwritev", 2), ("fsync", 0), ("rename", 0), ("open", 0)])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log, name: str, after: int) -> None:
    monkeypatch.setattr(entry_file, "PIECE_BYTES", 64)
    store = open_store(tmp_path)
    before = must(put(store, [1, 2, 3]))
    with monkeypatch.context() as patch:
        calls = failing(patch, name, errno.ENOSPC, after)
        assert put(store, PROMPT) is None
        assert names(tmp_path) == {before.path.name}, "no half file is left"
        tried = calls[0]
        assert put(store, PROMPT) is None
        assert calls[0] == tried, "it does not try each time"
        [record] = caplog.records
        assert "No space left on device" in record.message
        store._paused_until = 0.0
        assert put(store, PROMPT) is None
        assert len(caplog.records) == 1, "it is said once"
    assert put(store, PROMPT) is None, "it waits for a while"
    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + disk_store.PAUSE_SECONDS)
    assert get(store, must(put(store, PROMPT)))
    assert get(store, before)


def test_nobody_writes_to_a_file_that_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another file's by then."""
    monkeypatch.setattr(entry_file, "PIECE_BYTES", 96)
    begun, started, ended = threading.Event(), [], []

    def write(file: int, views: Any, place: int) -> int:
        if place == PAGE:
            begun.wait()
            raise OSError(errno.ENOSPC, "full")
        started.append(place)
        begun.set()
        time.sleep(0.3)
        ended.append(place)
        return sum(map(len, views))

    monkeypatch.setattr(os, "pwritev", write)
    assert put(open_store(tmp_path), PROMPT) is None
    assert started
    assert sorted(ended) == sorted(started)


def test_a_disk_without_a_free_byte_gives_up_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    old = must(put(store, [1, 2, 3]))
    new = must(put(store, [3, 4, 5]))
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, 0, 0, 0, 0, 0, 0, 0, 0)))
    entry = must(put(store, [7, 8, 9]))
    assert names(tmp_path) == {new.path.name, entry.path.name}
    assert not get(store, old)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path: Path, caplog: Log) -> None:
    entry = must(put(open_store(tmp_path), PROMPT))
    tmp_path.chmod(0o500)
    try:
        store = open_store(tmp_path)
        assert put(store, [1, 2, 3]) is None
        assert get(store, entry)
    finally:
        tmp_path.chmod(0o700)
    assert len(caplog.records) == 1


# ---- several at once ----


def test_two_stores_write_the_same_entry(tmp_path: Path) -> None:
    stores = [open_store(tmp_path) for _ in range(2)]
    tokens, done = list(range(201)), []

    def work(store: DiskStore) -> None:
        for stop in range(3, 201, 2):
            done.append(get(store, must(put(store, tokens[:stop]))))

    threads = [threading.Thread(target=work, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2 * 99
    assert all(done)
    assert len(reopened(tmp_path)) == len(names(tmp_path)) == 99


def test_what_another_has_written_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    put(one, PROMPT)
    calls = failing(monkeypatch, "pwritev", errno.ENOSPC)
    assert get(two, must(put(two, PROMPT)))
    assert calls == [0]
