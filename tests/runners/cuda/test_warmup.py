"""Kernels compiled ahead: each once, in threads, under the key that its launch looks for; and no harm if it fails."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from slipstream.engine.contract import DraftRequest
from slipstream.runners.cuda import warmup
from slipstream.runners.cuda.host_rows import RowFeed
from slipstream.runners.cuda.layout import Layout, lay_out
from slipstream.runners.cuda.warmup import (
    Launch,
    compile_together,
    distinct,
    hash_triton,
    one_of_each,
    recorded,
    warm_up,
)
from slipstream.runners.torch.models.layers import DecoderLayer, Layers, Sequential

SCRIPT = Path(__file__).parent / "warmup_report.py"


class Kernel:
    """A compiled one. It fails to load that often."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.asked = failures, 0

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        self.asked += 1
        if self.asked <= self.failures:
            raise RuntimeError("no context")


class Function:
    """As much of a JITFunction as compiling ahead asks for."""

    def __init__(self, kernel: Kernel | None = None) -> None:
        self.kernel = kernel
        self.compiled: list[str] = []

    def preload(self, specialization: str) -> Kernel:
        self.compiled.append(specialization)
        if self.kernel is None:
            raise TypeError("cannot be preloaded")
        return self.kernel


def launch(function: Function, key: str) -> bool | None:
    """As Triton does before it compiles: it skips a launch if the hook says True."""
    hook = triton.knobs.runtime.jit_cache_hook
    if hook is None:
        return None
    info = SimpleNamespace(module="some.kernels", name="kernel", jit_function=function)
    data = {"key": key, "specialization_data": f"data of {key}"}
    answer = hook(key=key, repr="", fn=info, compile=data, is_manual_warmup=False, already_compiled=False)
    return None if answer is None else bool(answer)


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Any:
    before = triton.knobs.runtime.jit_cache_hook
    yield
    assert triton.knobs.runtime.jit_cache_hook is before


def test_real_launches_find_what_was_compiled_ahead(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(SCRIPT.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"_skinny", "_attend_kernel", "_rms_norm_kernel", "_combine_kernel"} <= set(report["recorded"])
    repeated = {name for name in report["recorded"] if report["recorded"].count(name) > 1}
    assert repeated == {"skinny_prefetch"}  # two different ones; although each kernel was launched twice
    assert report["launched meanwhile"] == 0
    assert report["threads"] >= 1
    assert report["mended here"]
    assert report["missed"] == []
    assert report["launched"] == len(report["recorded"])
    assert report["as a launch compiles them"]
    assert {"_recur", "_draft_begin", "_truncate_kernel", "_within"} <= set(report["calibration"])
    assert report["not warmed up"] == []
    assert report["quantized, few tokens"] == 3 * ["_quantized"] + 2 * ["_weights_kernel"]  # in 4 bits for 8 and 16


def test_each_launch_is_recorded_once_and_skipped() -> None:
    function = Function()
    with recorded() as launches:
        assert [launch(function, key) for key in ("a", "b", "a")] == [True, True, True]
    assert launches == [Launch(function, "data of a"), Launch(function, "data of b")]
    assert launch(function, "a") is None
    assert function.compiled == []


def test_the_hook_is_given_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="capture"), recorded():
        raise RuntimeError("capture")
    assert triton.knobs.runtime.jit_cache_hook is None


@pytest.mark.parametrize("before", [None, lambda **info: info["key"] == "theirs"])
def test_launches_of_other_threads_go_on_as_before(
    before: Callable[..., bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", before)
    answers: list[bool | None] = []
    with recorded() as launches:
        thread = threading.Thread(target=lambda: answers.extend(launch(Function(), key) for key in ("theirs", "mine")))
        thread.start()
        thread.join()
    assert answers == ([None, None] if before is None else [True, False])
    assert launches == []


def test_a_kernel_that_fails_is_logged_and_the_others_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Function(Kernel()), Function()
    threads: set[int] = set()
    launches = [Launch(bad, "x"), *(Launch(good, str(i)) for i in range(5))]
    compile_together(launches, lambda: threads.add(threading.get_ident()))
    assert sorted(good.compiled) == list("01234")
    assert threads
    assert threading.get_ident() not in threads
    (record,) = caplog.records
    assert "1 of 6 kernels" in record.getMessage()
    assert "cannot be preloaded" in record.getMessage()


@pytest.mark.parametrize(("failures", "num_logged"), [(0, 0), (1, 0), (2, 1)])
def test_what_a_thread_cannot_load_is_loaded_here(
    failures: int, num_logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    compile_together([Launch(Function(Kernel(failures)), "x")], lambda: None)
    assert len(caplog.records) == num_logged


def test_a_long_wait_is_explained(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "PATIENCE", 0.0)
    hold = threading.Event()
    slow = SimpleNamespace(preload=lambda data: hold.wait(60) and Kernel())

    def release(record: logging.LogRecord) -> bool:
        hold.set()
        return True

    caplog.handler.addFilter(release)
    compile_together([Launch(slow, "x")], lambda: None)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling 1 kernels for this GPU: they are kept for the next start"
    ]


@dataclass(frozen=True)
class Program:
    """A program that launches one kernel, or fails to."""

    layers: Layers
    function: Function
    error: Exception | None = None
    num_layers: list[int] = field(default_factory=list)

    @property
    def decoder(self) -> Any:
        return SimpleNamespace(layers=self.layers)

    def with_layers(self, layers: Layers) -> Program:
        return replace(self, layers=layers)

    def step(self, layout: Layout) -> None:
        assert isinstance(self.layers, Sequential)
        self.num_layers.append(len(self.layers.layers))
        assert launch(self.function, "step")
        if self.error is not None:
            raise self.error


class Captures:
    """Graphs that run a step where they would capture it."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def dry_run(self, step: Callable[[], None]) -> None:
        step()


def layer(mixer: Any, mlp: Any) -> DecoderLayer:
    return DecoderLayer(None, mixer, None, mlp)  # type: ignore[arg-type]


def laid_out(num_tokens: int, num_rows: int, propose: int = 0, depth: int = 4) -> Layout:
    feeds = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    rows = [RowFeed(i, feed, draft=DraftRequest(propose)) for i, feed in enumerate(feeds)]
    return lay_out(rows, 64, depth, 64)


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {"current_blas_handle": 0, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def warmed_up(program: Any, layouts: list[Layout], *, enabled: bool = True) -> None:
    graphs: Any = Captures(enabled)
    warm_up(program, graphs, layouts)


def three_layers() -> Sequential:
    return Sequential([layer("a", "b"), layer("c", "d"), layer("e", "f")])


@pytest.mark.usefixtures("_a_gpu")
def test_a_warm_up_compiles_the_kernels_of_its_steps() -> None:
    kernel = Kernel()
    program = Program(three_layers(), Function(kernel))
    warmed_up(program, [laid_out(1, 1), laid_out(4, 1), laid_out(4, 1)])
    assert program.function.compiled == ["data of step"]
    assert kernel.asked
    assert program.num_layers == [2, 2]  # of three


@pytest.mark.usefixtures("_a_gpu")
def test_a_warm_up_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warmed_up(Program(three_layers(), Function(), RuntimeError("capture refused")), [laid_out(1, 1)])
    assert "one by one" in caplog.text
    assert "capture refused" in caplog.text


def test_without_captured_steps_there_is_no_warm_up() -> None:
    program = Program(three_layers(), Function())
    warmed_up(program, [laid_out(1, 1)], enabled=False)
    assert program.num_layers == []


def test_layouts_that_need_the_same_kernels_are_warmed_up_once() -> None:
    chosen = distinct([laid_out(2, 2), laid_out(4, 4), laid_out(16, 16), laid_out(4, 2), laid_out(2, 2, propose=1)])
    assert [(layout.shape.num_rows, layout.shape.tile_size, len(layout.pass_rows)) for layout in chosen] == [
        (2, 1, 0),
        (4, 1, 0),
        (16, 1, 0),
        (2, 8, 0),
        (2, 1, 1),
    ]


def test_up_to_8_tokens_and_more_are_warmed_up_each() -> None:
    """Products in 4 bits differ."""
    chosen = distinct([laid_out(6, 2, depth=2), laid_out(12, 4, depth=2), laid_out(9, 3, depth=2)])
    assert [layout.shape.num_tokens for layout in chosen] == [6, 12]


def test_one_layer_of_each_kind_and_the_first_after_another() -> None:
    layers = [layer(1, "mlp"), layer(2, "mlp"), layer(3.0, "mlp"), layer(4, b"experts")]
    chosen = one_of_each(Sequential(layers))
    assert isinstance(chosen, Sequential)
    assert len(chosen.layers) == 4
    assert chosen.layers[-1] is chosen.layers[0]
    assert {(type(each.mixer), type(each.mlp)) for each in chosen.layers} == {(int, str), (float, str), (int, bytes)}


def test_triton_is_hashed_once_and_early() -> None:
    triton.runtime.cache.triton_key.cache_clear()
    hash_triton().join()
    assert triton.runtime.cache.triton_key.cache_info().currsize == 1
