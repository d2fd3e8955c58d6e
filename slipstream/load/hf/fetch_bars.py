"""What the hub's client tells of a download: on a terminal it draws bars, for logs they become lines.

The bars also end it. The client's threads fetch whatever is in their queue, even where nobody waits any more.
"""

from __future__ import annotations

import io
import sys
import time
from typing import Any

SECONDS = 5.0  # between two lines


class Cancelled(BaseException):
    """Raised in the client's threads. No Exception: there it would be taken for a fault of the network."""


class FetchBars:
    """``as_lines``: instead of bars."""

    def __init__(self, hub_id: str, as_lines: bool) -> None:
        self._hub_id = hub_id
        self._as_lines = as_lines
        self._cancelled = False
        self._fetched = 0
        self._at = float("-inf")

    def cancel(self) -> None:
        """Of each file that is being fetched, no more than what is on its way; no other one."""
        self._cancelled = True

    def close(self) -> None:
        if self._fetched and self._as_lines:
            _say(f"fetched {self._hub_id}: {_megabytes(self._fetched)} MB")

    def bar_class(self) -> type[Any]:
        """Of which the hub's client makes its bars."""
        from huggingface_hub.utils.tqdm import tqdm  # slow to import: only where the hub is needed

        advance = self._advance
        base: Any = tqdm
        unseen = {"disable": False, "file": io.StringIO()} if self._as_lines else {}

        class Bar(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **how: Any) -> None:
                super().__init__(*args, **how | unseen)

            def update(self, n: float | None = 1) -> bool | None:
                drawn: bool | None = super().update(n)
                counts_bytes = not self.disable and self.unit == "B"  # another bar counts files
                advance(*(int(self.n), int(self.total or 0)) if counts_bytes else (0, 0))
                return drawn

        return Bar

    def _advance(self, num_bytes: int, total: int) -> None:
        """Of bars that count the same: the one ahead counts."""
        if self._cancelled:
            raise Cancelled
        if num_bytes <= self._fetched:
            return
        self._fetched = num_bytes
        if self._as_lines and time.monotonic() - self._at >= SECONDS:
            self._at = time.monotonic()
            _say(f"fetching {self._hub_id}: {_megabytes(num_bytes)} of {_megabytes(total)} MB")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
