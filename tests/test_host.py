"""Threads that compile grammars stand back behind those that compute; open files stay as they were allowed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.host import NICENESS, keeping_max_open_files, lower_priority


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows threads by number")
def test_a_thread_gives_way_alone() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=lower_priority) as threads:
        assert threads.submit(niceness).result() == max(before, NICENESS)
    assert niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows threads by number")
def test_nobody_becomes_less_modest() -> None:
    def twice() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        lower_priority()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(twice).result() == 15


LIMITS = "resource.getrlimit(resource.RLIMIT_NOFILE)"
IMPORTING = f"""
import resource
before = {LIMITS}
import slipstream.runners.mlx
assert {LIMITS} == before, {LIMITS}
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
assert {LIMITS} == (100, 100)
"""


def test_mlx_lm_leaves_the_open_files_alone() -> None:
    """It sets them when it is imported. Afterwards the process may change them as any other."""
    pytest.importorskip("mlx_lm")
    subprocess.run([sys.executable, "-c", IMPORTING], check=True)


def test_a_lower_limit_is_not_set_and_a_usual_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *words: asked.append(words))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with keeping_max_open_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, 20))
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    assert asked == [(resource.RLIMIT_NOFILE, (10, hard)), (resource.RLIMIT_CORE, (0, 0))]
