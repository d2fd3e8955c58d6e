"""Threads that compile grammars stand back behind those that compute."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.host import NICENESS, lower_priority


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
