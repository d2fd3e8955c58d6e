"""Threads that compile grammars stand back behind those that compute."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.host import MODEST, give_way


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows threads by number")
def test_a_thread_gives_way_alone() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=give_way) as threads:
        assert threads.submit(niceness).result() == max(before, MODEST)
    assert niceness() == before
