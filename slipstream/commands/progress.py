"""Progress on standard error: a bar on a terminal; elsewhere lines, for logs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

from slipstream.commands.text import size

LINE_SECONDS = 1.0  # between two lines of progress, at least
WAIT_SECONDS = 5.0  # after so long a line comes, however little is done
SHARE = 0.1  # that a line is worth before then
T = TypeVar("T")
Say = Callable[[str], None]


def say(text: str) -> None:
    """A line for people, while the result of a command goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def clear_line() -> None:
    """Takes bars off the screen that something interrupted, also half-drawn ones. Threads that go on draw no more."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Lines:
    """Says how far something is: seldom where it goes fast, every few seconds where it is slow."""

    def __init__(self, seconds: float = LINE_SECONDS, say: Say = say) -> None:
        self._seconds, self._say = seconds, say
        self._share, self._at = 0.0, time.monotonic()

    def report(self, share: float, text: str) -> None:
        """The last one is always said."""
        passed = time.monotonic() - self._at
        if share < 1.0 and passed < (self._seconds if share - self._share >= SHARE else WAIT_SECONDS):
            return
        self._share, self._at = share, time.monotonic()
        self._say(text)


class LoadingBar:
    """From the first bytes of a model to the last. ``lines``: not silent where there is no terminal."""

    def __init__(self, *, lines: bool = False, say: Say = say) -> None:
        self._lines = Lines(say=say) if lines and not sys.stderr.isatty() else None
        self._lock = threading.Lock()  # loaded in one thread, closed in another
        self._bar: tqdm | None = None
        self._read = 0
        self._closed = False

    def __call__(self, num_bytes: int, total: int) -> None:
        with self._lock:
            if self._closed:
                return
            self._read += num_bytes
            if self._lines is not None:
                self._report(self._lines, total)
            elif self._bar is None:
                self._bar = _bar(total, "loading", unit="B", unit_scale=True)
            if self._bar is not None:
                self._bar.update(num_bytes)
                if self._read >= total:
                    self._bar.set_description("read, getting ready")

    def _report(self, lines: Lines, total: int) -> None:
        done = self._read >= total
        far = f"{size(total)} read, getting ready" if done else f"{100 * self._read // total} % of {size(total)}"
        lines.report(self._read / total, f"loading: {far}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.close()


class Turns:
    """A part of a measurement that has several turns."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._bar = _bar(total, what)
        self._lines = None if sys.stderr.isatty() else Lines()
        if self._lines is not None:
            say(f"{what}: 0 of {total}")

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self) -> None:
        self._done += 1
        self._bar.update()
        if self._lines is not None:
            self._lines.report(self._done / self._total, f"{self._what}: {self._done} of {self._total}")


def shown(turns: Sequence[T], what: str) -> Iterator[T]:
    """The turns one by one, with progress."""
    with Turns(what, len(turns)) as progress:
        for turn in turns:
            yield turn
            progress.advance()


def _bar(total: int, what: str, **how: object) -> tqdm:
    shown = sys.stderr.isatty()
    bar: tqdm = tqdm(total=total, desc=what, file=sys.stderr, leave=False, disable=not shown, **how)
    return bar
