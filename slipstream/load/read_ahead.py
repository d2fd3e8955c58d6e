"""Asks the system for what will be read next, so that the disk works while one thread converts weights.

A mapped file is read when it is touched: without this, whoever touches it waits for one small read after the other.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType

from slipstream.load.opened import OpenedModel
from slipstream.load.tensor import Checkpoint, Place

AHEAD = 512 << 20  # bytes asked for beyond those that were read: what does not stay in memory would be read twice
REQUEST = 128 << 10  # bytes: of larger ones Linux takes only the first part
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class ReadAhead:
    """A context manager, with a thread of its own while there is something to ask and a system that can be asked."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._allowed = AHEAD
        self._moves = threading.Condition()
        self._is_open = bool(places) and hasattr(os, "posix_fadvise")
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        if self._is_open:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._moves:
            self._is_open = False
            self._moves.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def advance(self, num_bytes: int) -> None:
        """So many more were read. For any thread."""
        with self._moves:
            self._allowed += num_bytes
            self._moves.notify()

    def _run(self) -> None:
        asked = 0
        for place in self._places:
            # Whoever reads the file says what is wrong with it.
            with suppress(OSError), place.path.open("rb", buffering=0) as file:
                for start in range(place.start, place.stop, REQUEST):
                    size = min(REQUEST, place.stop - start)
                    if not self._may_ask(asked + size):
                        return
                    os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
                    asked += size

    def _may_ask(self, num_bytes: int) -> bool:
        """Once so many are allowed in all. False: nobody reads any more."""
        with self._moves:
            self._moves.wait_for(lambda: num_bytes <= self._allowed or not self._is_open)
            return self._is_open


def places_in_order(model: OpenedModel) -> list[Place]:
    """As loaders read them: the target model layer by layer, then its other tensors, then the head."""
    in_head, head = model.spec.head.owns, model.head
    places = _by_layer(model.checkpoint, (name for name in model.checkpoint.names() if not in_head(name)))
    if head is not None:
        places += _by_layer(head, (name for name in head.names() if in_head(name)))
    return list(dict.fromkeys(places))


def _by_layer(checkpoint: Checkpoint, names: Iterable[str]) -> list[Place]:
    layers: dict[float, list[Place]] = {}
    for name in names:
        layer = LAYER.match(name)
        layers.setdefault(int(layer[1]) if layer else float("inf"), []).extend(checkpoint.places(name))
    return [place for _, places in sorted(layers.items()) for place in sorted(places, key=_in_file)]


def _in_file(place: Place) -> tuple[str, int]:
    return str(place.path), place.start
