"""What every room's tests share: settings, a core a worker, what `make test` leaves out, and the line that says so."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch
from hypothesis import settings

from slipstream.host import available_threads, keeping_max_open_files

settings.register_profile("slipstream", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("slipstream")

# On a CPU MLX compiles its fused functions with a C++ compiler, for longer than these tests compute.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

# Tests import mlx-lm, which would leave this process, and all that it starts, with 4096 open files at most.
LIMITS_STAY = keeping_max_open_files()  # held: it ends with the object
LIMITS_STAY.__enter__()

# Tiny tensors gain nothing from a second thread, and waiting for it on a busy machine costs much.
torch.set_num_threads(1)

# Without a GPU, Triton kernels run in its interpreter. Read when a kernel is decorated, so set before any is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from quick_interpreter import quicken

        quicken()

# Workers of pytest-xdist have a core each: kernels and servers that they start take as many threads as they may use.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(WORKER.removeprefix("gw")) % len(cores)]})

MOST_WORKERS = 8  # each of them takes a gigabyte
PRODUCTS = {"each_value": 1, "each_pair": 2}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means."""
    return min(MOST_WORKERS, available_threads())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests marked first there. Of one marked each_value or each_pair, marks what shows nothing new as exhaustive.

    A worker without tests takes those that another would run last: what is first stays with the worker that set it up.
    """
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    products = defaultdict(list)
    for item in items:
        for mark, size in PRODUCTS.items():
            if item.get_closest_marker(mark) and not item.get_closest_marker("exhaustive"):
                products[item.nodeid.partition("[")[0], size].append(item)
    for (_, size), cases in products.items():
        for item in left_over({item: shown_by(item, size) for item in cases}):
            item.add_marker("exhaustive")


def shown_by(item: pytest.Item, size: int) -> set[object]:
    """The values, or the pairs of values, of a case's parameters."""
    values = ((name, repr(value)) for name, value in item.callspec.params.items())  # type: ignore[attr-defined]
    return set(combinations(sorted(values), size))


def left_over(shown: dict[pytest.Item, set[object]]) -> list[pytest.Item]:
    """Takes the case that shows the most that is new, and of those the rarest values, until nothing is; the others."""
    cases, left, uses = list(shown), set[object]().union(*shown.values()), Counter[object]()
    while left:
        best = max(cases, key=lambda item: (len(shown[item] & left), -sum(uses[each] for each in shown[item])))
        left -= shown[best]
        uses.update(shown[best])
        cases.remove(best)
    return cases


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for what this machine lacks: a browser, a compiler, a GPU."""
    reports = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        reported = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"not tested: {reported}")
