"""How far a download from the hub is, as lines for logs: on a terminal the hub's client draws bars of its own."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

SECONDS = 5.0  # between two lines


class FetchLines:
    """Hears of bytes from the bars of `bar_class`, which the hub's client makes in place of its own."""

    def __init__(self, hub_id: str) -> None:
        self._hub_id = hub_id
        self._fetched = 0
        self._at = float("-inf")

    def report(self, num_bytes: int, total: int) -> None:
        """Of bars that count the same: the one ahead counts."""
        if num_bytes <= self._fetched:
            return
        self._fetched = num_bytes
        if time.monotonic() - self._at >= SECONDS:
            self._at = time.monotonic()
            _say(f"fetching {self._hub_id}: {_megabytes(num_bytes)} of {_megabytes(total)} MB")

    def close(self) -> None:
        if self._fetched:
            _say(f"fetched {self._hub_id}: {_megabytes(self._fetched)} MB")

    def bar_class(self) -> type[Any]:
        from huggingface_hub.utils.tqdm import tqdm  # slow to import: only where the hub is needed

        report = self.report
        base: Any = tqdm

        class Bar(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **how: Any) -> None:
                super().__init__(*args, **how | {"disable": False, "file": io.StringIO()})

            def update(self, n: float | None = 1) -> bool | None:
                drawn: bool | None = super().update(n)
                if not self.disable and self.unit == "B":  # another one counts files
                    report(int(self.n), int(self.total or 0))
                return drawn

        return Bar


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
