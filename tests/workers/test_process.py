"""Worker processes: what they answer, and what is said of those that do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from odd_worker import NICENESS

from slipstream.workers.pool import WorkerPool
from slipstream.workers.process import Crashed, OutOfTime, Unavailable, WorkerProcess

WAIT = 300.0  # a busy machine may be slow; nothing waits this long where all is well


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("odd_worker", str(tmp_path))
    yield worker
    worker.close()


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("given", ["é \ud800 \u2028 \n", {"a": [1, None, 2.5, 1 << 80]}, "x" * 3_000_000])
def test_what_is_sent_comes_back(worker: WorkerProcess, given: object) -> None:
    assert worker.ask(("echo", given), WAIT) == given


def test_one_process_answers_many(worker: WorkerProcess) -> None:
    worker.start()
    assert len({worker.ask(("pid", None), WAIT) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("request_", "verdict"), [(("hang", "x"), OutOfTime), (("abort", 0), Crashed), (("panic", 0), Crashed)]
)
def test_verdicts(worker: WorkerProcess, request_: tuple[str, object], verdict: type[Exception]) -> None:
    """A process that did not answer is replaced."""
    before = worker.ask(("pid", None), WAIT)
    with pytest.raises(verdict):
        worker.ask(request_, 0.2 if verdict is OutOfTime else WAIT)
    assert not is_running(before)
    assert worker.ask(("pid", None), WAIT) != before


@pytest.mark.skipif(not hasattr(os, "nice"), reason="processes have no niceness here")
def test_it_gives_way_once_it_has_started(worker: WorkerProcess) -> None:
    """Not before: beside a busy engine it would take minutes to start."""
    at_start, now = worker.ask(("niceness", None), WAIT)
    assert at_start == os.nice(0)
    assert now == min(19, at_start + NICENESS)


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="the system does not count processor time")
def test_processor_time_is_what_counts(worker: WorkerProcess) -> None:
    """A process that gets none of it for a while is not late."""
    assert worker.ask(("sleep", 0.5), WAIT, cpu_seconds=0.3) is None
    with pytest.raises(OutOfTime):
        worker.ask(("compute", None), WAIT, cpu_seconds=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound it")
def test_memory_is_bounded(worker: WorkerProcess) -> None:
    assert worker.ask(("take", 200 << 20), WAIT) == 200 << 20
    with pytest.raises(Crashed):
        worker.ask(("take", 300 << 20), WAIT)


def test_a_process_killed_from_outside_is_no_verdict(worker: WorkerProcess) -> None:
    os.kill(worker.ask(("pid", None), WAIT), signal.SIGKILL)
    assert worker.ask(("echo", 1), WAIT) == 1
    assert worker.ask(("die once", "mark"), WAIT) == "alive"
    assert worker.seconds < WAIT, "the time that passed, not all that it was given"
    with pytest.raises(Unavailable, match="from outside"):
        worker.ask(("die", "mark"), WAIT)
    assert worker.ask(("echo", 2), WAIT) == 2


def test_closing_ends_a_request(worker: WorkerProcess, tmp_path: Path) -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            worker.ask(("hang", "hangs"), WAIT)
        except Unavailable as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    until((tmp_path / "hangs").exists)
    worker.close()
    thread.join(WAIT)
    assert said == ["it was closed"]
    assert worker.ask(("echo", 1), WAIT) == 1


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match="does not start"):
        WorkerProcess("no_such_worker", None).ask(0, WAIT)


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_parent(tmp_path: Path, busy: bool) -> None:
    """Also when the parent is killed. A busy one has twice its time at most."""
    code = f"""if True:
        from slipstream.workers.process import WorkerProcess
        worker = WorkerProcess("odd_worker", {str(tmp_path)!r})
        print(worker.ask(("pid", None), {WAIT}), flush=True)
        worker.ask(("hang", "hangs"), 1.0) if {busy} else input()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if busy:
            until((tmp_path / "hangs").exists)
        parent.kill()
    until(lambda: not is_running(child))


def test_a_pool_answers_while_one_hangs(tmp_path: Path) -> None:
    pool = WorkerPool("odd_worker", str(tmp_path), 2)

    def hang() -> None:
        with suppress(Unavailable):
            pool.ask(("hang", "hangs"), WAIT)

    hanging = threading.Thread(target=hang)
    hanging.start()
    try:
        until((tmp_path / "hangs").exists)
        assert pool.ask(("echo", 1), WAIT) == 1
    finally:
        pool.close()
    hanging.join(WAIT)
    assert not hanging.is_alive()
