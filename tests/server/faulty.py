"""`slipstream serve` whose engine thread meets an exception in its next step once the process gets SIGUSR1."""

from __future__ import annotations

import signal
import sys
import threading

from slipstream.cli import main
from slipstream.engine.contract import StepPlan
from slipstream.runners.host.runner import HostRunner
from slipstream.server.service import service

struck = threading.Event()
submit = HostRunner.submit


def failing(runner: HostRunner, plan: StepPlan) -> None:
    if struck.is_set():
        raise RuntimeError("injected: a lost device at 0x7f00 in /dev/somewhere")
    submit(runner, plan)


HostRunner.submit = failing  # type: ignore[method-assign]
service.FINAL_ERROR_SECONDS = 10.0  # on a slow machine it takes clients long to look
signal.signal(signal.SIGUSR1, lambda number, frame: struck.set())
sys.exit(main())
