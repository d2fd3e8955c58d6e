"""What is read past the system's cache: the same bytes as by the mapping, in whatever order they are asked for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_gguf
from harness import Ask, alone
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import Options

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load import direct_reads, open_model
from slipstream.load.direct_reads import PAGE, DirectReads, _Memory, is_worth_it, read_ahead_bytes
from slipstream.load.mapped_file import MappedFile
from slipstream.load.read_ahead import places_in_order
from slipstream.load.tensor import Place
from slipstream.runners.choose import choose_backend
from slipstream.runners.host.runner import HostRunner
from slipstream.sampling import SamplingParams

SIZE = 5 * PAGE + 123


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On a file system that can be read past its cache."""
    folder = tmp_path_factory.mktemp("direct")
    (folder / "x").write_bytes(b"x")
    try:
        os.close(os.open(folder / "x", os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("a file system that is read past its cache")
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> MappedFile:
    (folder / "bytes").write_bytes(np.random.default_rng(1).bytes(SIZE))
    return MappedFile(folder / "bytes")


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "direct-reads"]


def place(file: MappedFile, start: int, stop: int) -> Place:
    return Place(file.path, start, stop)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_bytes_of_the_mapping(file: MappedFile, data: st.DataObject) -> None:
    """Parts in any order, several times, some that are not in the list; and after they were released."""
    bounds = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(lambda ab: (ab[0], min(SIZE, sum(ab))))
    parts = data.draw(st.lists(bounds, min_size=1, max_size=6, unique=True))
    asked = data.draw(st.lists(st.sampled_from([*parts, (7, 77)]), max_size=12))
    ahead = data.draw(st.sampled_from([1, PAGE, SIZE]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_reads, "AHEAD", ahead)
        with DirectReads([file], [place(file, *part) for part in parts]):
            found = []
            for start, stop in asked:
                found.append(file.part(start, stop))
                if data.draw(st.booleans()):
                    file.release()
    for array, (start, stop) in zip(found, asked, strict=True):
        assert np.array_equal(array, file.data[start:stop])
        assert not array.flags.writeable
    assert file.reader is None


def test_what_was_read_is_taken_from_it(file: MappedFile) -> None:
    with DirectReads([file], [place(file, 10, 5000)]):
        taken = file.part(10, 5000)
        assert not np.shares_memory(taken, file.data)
        assert np.shares_memory(file.part(10, 5000), taken)
        file.release()
        again = file.part(10, 5000)  # it is read once: afterwards the mapping has it
        assert np.shares_memory(again, file.data)
    assert np.array_equal(taken, again)


def test_not_further_ahead_than_there_is_room(file: MappedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_reads, "AHEAD", 2 * PAGE)
    places = [place(file, at * PAGE, (at + 1) * PAGE) for at in range(5)]
    with DirectReads([file], places) as reads:

        def read_by_now(count: int) -> bool:
            until = time.monotonic() + 60
            while reads._num_done < count and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.05)  # as much as it would take to go too far
            return reads._num_done == count

        assert read_by_now(2)
        file.part(0, PAGE)
        assert read_by_now(3)
        file.part(4 * PAGE, 5 * PAGE)  # what lies before it is read first, whatever the room
        assert read_by_now(5)


def test_memory_is_used_again_once_no_view_of_it_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more of it is kept than allowed."""
    monkeypatch.setattr(direct_reads, "AHEAD", 4 * PAGE)
    (folder / "parts").write_bytes(np.random.default_rng(3).bytes(8 * PAGE))
    memory, descriptor = _Memory(), os.open(folder / "parts", os.O_RDONLY | os.O_DIRECT)
    try:
        first = memory.read(descriptor, 0, 2 * PAGE)
        where, view = first.ctypes.data, first.view("<u2").reshape(4, -1)[1:3]
        wanted = view.copy()
        del first
        second = memory.read(descriptor, 2 * PAGE, 4 * PAGE)
        assert second.ctypes.data != where
        assert np.array_equal(view, wanted)
        del view
        assert memory.read(descriptor, 4 * PAGE, 6 * PAGE).ctypes.data == where
        del second
        large = memory.read(descriptor, 0, 8 * PAGE)
        del large
        assert sum(map(len, memory._free)) <= 4 * PAGE
        memory.close()
        assert not memory._free
    finally:
        os.close(descriptor)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", ["gone", "short", "refused", "a fault of ours"])
def test_what_cannot_be_read_this_way_comes_from_the_mapping(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    content = np.random.default_rng(2).bytes(3 * PAGE)
    (folder / fault).write_bytes(content)
    file = MappedFile(folder / fault)
    if fault == "gone":
        file.path.unlink()
    elif fault == "short":
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
    elif fault == "a fault of ours":
        monkeypatch.setattr(os, "preadv", lambda *_: 1 // 0)
    else:
        monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    with DirectReads([file], [place(file, 0, 3 * PAGE)]):
        assert file.part(0, 3 * PAGE).tobytes() == content


def test_only_for_large_files_that_are_not_at_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "large").write_bytes(bytes(64 * PAGE))
    file = MappedFile(folder / "large")
    assert not is_worth_it([file])
    assert read_ahead_bytes([file]) == 0
    monkeypatch.setattr(direct_reads, "LEAST", 64 * PAGE)
    assert read_ahead_bytes([file]) == 2 * direct_reads.AHEAD
    assert not is_worth_it([file]), "it was written just now, so the system has it"
    monkeypatch.setattr(direct_reads, "_is_at_hand", lambda descriptor, offset: offset < 31 * PAGE)
    assert is_worth_it([file])


@pytest.mark.parametrize("kind", ["gguf", "split gguf", "folder"])
def test_a_model_is_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """And nothing is read by the mapping but headers, and what is not in the list."""
    if kind == "folder":
        path = tiny.save(tiny.build("qwen3_5_moe"), tmp_path, head=True)
    else:
        options = Options(lambda name: "Q4_K", parts=3 if kind == "split gguf" else 1)
        tiny_gguf.write(tiny_gguf.wide(), tmp_path / "x.gguf", options)
        path = tmp_path
    model, ask = open_model(str(path)), Ask((3, 1, 4, 1, 5), SamplingParams(temperature=0.0, max_tokens=8, seed=1), 0)

    def tokens() -> object:
        runner = choose_backend(RunnerConfig("cpu")).load(model, EngineConfig(max_streams=1))
        assert isinstance(runner, HostRunner)
        return alone(runner, ask)

    wanted = tokens()
    monkeypatch.setattr(direct_reads, "LEAST", 1)
    monkeypatch.setattr(direct_reads, "_is_at_hand", lambda descriptor, offset: False)
    taken: list[Place] = []
    take = DirectReads.take

    def noted(reads: DirectReads, *where: Any) -> np.ndarray | None:
        found = take(reads, *where)
        if found is not None:
            taken.append(Place(*where))
        return found

    monkeypatch.setattr(DirectReads, "take", noted)
    assert tokens() == wanted
    assert set(taken) == set(places_in_order(model))
