"""The pool and the build: each chunk once, no delay by busy neighbours, a sentence where there is no compiler."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slipstream.runners.cpu import build as building
from slipstream.runners.cpu.bindings import Kernels


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_chunk_runs_once(kernels: Kernels, threads: int) -> None:
    kernels.set_threads(threads)
    for num_chunks in (1, 2, 3, 50, 1000):
        once, many = torch.zeros(num_chunks), torch.zeros(num_chunks)
        kernels.probe(once, 1)
        kernels.probe(many, 300)
        assert torch.allclose(many, once * 300)
    kernels.set_threads(2)


def test_workers_wake_after_a_pause(kernels: Kernels) -> None:
    out, once = torch.zeros(64), torch.zeros(64)
    kernels.probe(once, 1)
    for _ in range(20):
        time.sleep(0.002)  # longer than they spin
        kernels.probe(out, 1)
    assert torch.allclose(out, once * 20)


def times_put_aside() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a thread's own switches")
def test_busy_neighbours(kernels: Kernels) -> None:
    """With a busy process on every core a job is slower by what they take, not by a time slice each.

    Counted in slices, not in seconds: how many there are does not depend on the machine's speed.
    """
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    neighbours = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
    try:
        for process in neighbours:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        num_jobs, before = 2000, times_put_aside()
        kernels.probe(torch.zeros(16), num_jobs)
        assert times_put_aside() - before < num_jobs / 10
    finally:
        for process in neighbours:
            process.kill()
            process.communicate()


def _child(kernels: Kernels, queue: multiprocessing.SimpleQueue[bool]) -> None:
    out = torch.zeros(8)
    kernels.probe(out, 5)
    queue.put(bool((out > 0).all()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_fork_the_child_works_alone(kernels: Kernels) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_child, args=(kernels, queue))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert queue.get()


def test_no_compiler_gives_a_sentence(tmp_path: Path) -> None:
    built = building.build(directory=tmp_path, compilers=("no-such-compiler",))
    assert built.library is None
    assert "no C compiler" in built.why_not


def test_failing_compiler_gives_a_sentence(tmp_path: Path) -> None:
    built = building.build(["-DVL=bad", "-include", "no-such-header.h"], tmp_path)
    assert built.library is None
    assert "could not compile" in built.why_not
    assert "no-such-header.h" in built.why_not
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_gives_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    built = building.build(directory=tmp_path / "file" / "kernels")
    assert built.library is None
    assert "could not be built" in built.why_not


def test_second_build_comes_from_the_cache(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "compile_to", lambda *_: "error: compiled again")
    assert building.build().library is not None
