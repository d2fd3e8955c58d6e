"""What the system is asked to read ahead: all that loading will read, in that order, and not too far ahead."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import until

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load import open_model
from slipstream.load.gguf.file import open_gguf
from slipstream.load.random.model import open_random
from slipstream.load.read_ahead import REQUEST, ReadAhead, places_in_order
from slipstream.load.tensor import Place
from slipstream.runners.choose import choose_backend
from slipstream.runners.torch import loading

Asked = list[tuple[Path, int, int]]  # file, start, bytes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system cannot be asked")
    found: Asked = []

    def note(descriptor: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), start, size))

    monkeypatch.setattr(os, "posix_fadvise", note)
    yield found
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def run_to_its_end(ahead: ReadAhead) -> None:
    with ahead:
        ahead._thread.join(60)


def test_pieces_in_order(asked: Asked, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"x")
    first, second = Place(tmp_path / "one", 100, 100 + 2 * REQUEST + 1), Place(tmp_path / "two", 0, 7)
    gone = Place(tmp_path / "gone", 0, 9)
    run_to_its_end(ReadAhead([first, gone, second]))
    assert asked == [
        (first.path, 100, REQUEST),
        (first.path, 100 + REQUEST, REQUEST),
        (first.path, 100 + 2 * REQUEST, 1),
        (second.path, 0, 7),
    ]


def test_not_further_ahead_than_allowed(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.load.read_ahead.AHEAD", 3 * REQUEST)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with ReadAhead([Place(file, 0, 10 * REQUEST)]) as ahead:
        for num_read, num_pieces in ((0, 3), (REQUEST, 4), (2 * REQUEST, 6), (1, 6)):  # a byte allows no further piece
            ahead.advance(num_read)
            end = time.monotonic() + 60
            while len(asked) < num_pieces and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.02)
            assert len(asked) == num_pieces
    assert len(asked) == 6


def test_where_nothing_can_be_asked_there_is_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for places in ([], [Place(tmp_path, 0, 5)]):
        with ReadAhead(places) as ahead:
            assert (ahead._thread.ident is not None) == bool(places)  # it was started; it may have ended
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        with ReadAhead(places) as ahead:
            ahead.advance(5)
            assert ahead._thread.ident is None
        monkeypatch.undo()


def test_a_file_and_its_tensors(build: Any, tmp_path: Path) -> None:
    checkpoint = open_gguf(build.gguf(tmp_path / "model.gguf"))
    whole = (tmp_path / "model.gguf").read_bytes()
    for name in checkpoint.names():
        [place] = checkpoint.places(name)
        assert place.path == tmp_path / "model.gguf"
        assert place.stop - place.start == checkpoint.num_bytes(name)
        if "q_proj" not in name and "k_proj" not in name:  # whose rows come in another order
            assert whole[place.start : place.stop] == checkpoint.get(name).data.tobytes()


def test_layer_by_layer_whatever_the_order_of_the_file(build: Any, tmp_path: Path) -> None:
    """Twelve layers, which safetensors files have in the order of the alphabet: 0, 1, 10, 11, 2, ..."""
    layer = {name: array for name, array in build.llama_tensors().items() if name.startswith("model.layers.0.")}
    extra = {name.replace("layers.0.", f"layers.{i}."): array for name, array in layer.items() for i in range(1, 12)}
    folder = build.llama_folder(tmp_path, dict(sorted(extra.items())), num_hidden_layers=12)
    model = open_model(str(folder))
    names = {model.checkpoint.places(name)[0]: name for name in model.checkpoint.names()}
    order = [names[place].split(".") for place in places_in_order(model)]
    assert [int(name[2]) for name in order if name[1] == "layers"] == [i for i in range(12) for _ in layer]
    assert [".".join(name[:2]) for name in order[-2:]] == ["model.embed_tokens", "model.norm"]
    assert sum(place.stop - place.start for place in places_in_order(model)) == model.num_bytes


def test_what_is_made_up_lies_nowhere() -> None:
    assert places_in_order(open_random("tiny")) == places_in_order(open_random("tiny", stored_as="Q8_0")) == []


def test_a_cpu_asks_for_nothing(asked: Asked, build: Any, tmp_path: Path) -> None:
    """All its processors work on what was read, and asking takes their time."""
    model = open_model(str(build.llama_folder(tmp_path)))
    choose_backend(RunnerConfig("cpu")).load(model, EngineConfig(max_streams=1)).close()
    assert not asked


def test_a_gpu_is_read_ahead_for(asked: Asked, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that loading reads, while it loads: which is left out here, as the GPU is."""
    model = open_model(str(build.llama_folder(tmp_path)))
    loader = SimpleNamespace(load=lambda: until(lambda: sum(size for _, _, size in asked) == model.num_bytes))
    monkeypatch.setattr(loading, "_Loader", lambda *_: loader)
    platform: Any = SimpleNamespace(ops=SimpleNamespace(device=SimpleNamespace(type="cuda")))
    plan: Any = SimpleNamespace()
    loading.load_runner(model, EngineConfig(max_streams=1), RunnerConfig("cpu"), platform, plan)
