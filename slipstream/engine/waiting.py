"""The waiting sequences: preempted ones first, the others by client in turn.

With k clients waiting each has every k-th turn, for its requests in their order. A turn is one sequence or one sample
group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import Generic, TypeVar

from slipstream.engine.parallel_samples import first_group
from slipstream.engine.request import Sequence

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """A line for each client; they take turns."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # the next turn's first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[T]:
        """In no order."""
        return chain.from_iterable(self._lines.values())

    def add(self, client: str, item: T) -> None:
        self._lines.setdefault(client, deque()).append(item)

    def remove(self, client: str, item: T) -> None:
        self._lines[client].remove(item)
        if not self._lines[client]:
            del self._lines[client]

    def next_line(self) -> deque[T]:
        """The line of the client whose turn it is. Only for reading."""
        return next(iter(self._lines.values()))

    def take(self, count: int = 1) -> list[T]:
        """The first items of that line; the client's next turn comes after those of all others."""
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        items = [line.popleft() for _ in range(count)]
        if line:
            self._lines[client] = line
        return items

    def count(self, client: str) -> int:
        return len(self._lines.get(client, ()))

    def longest(self) -> tuple[str, int]:
        """The client with most items, and how many these are."""
        client = max(self._lines, key=lambda each: len(self._lines[each]))
        return client, len(self._lines[client])

    def pop_newest(self, client: str) -> T:
        item = self._lines[client][-1]
        self.remove(client, item)
        return item


class WaitingLine:
    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._new: RoundRobin[Sequence] = RoundRobin()

        self._parked: list[list[Sequence]] = []  # groups that wait for what another sequence computes

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new) + sum(map(len, self._parked))

    def __iter__(self) -> Iterator[Sequence]:
        """In no order."""
        return chain(self.in_line(), *self._parked)

    def in_line(self) -> Iterator[Sequence]:
        """Those that wait for room only, in no order."""
        return chain(self._preempted, self._new)

    @property
    def has_next(self) -> bool:
        return bool(self._preempted) or len(self._new) > 0

    def park(self, group: Items[Sequence]) -> None:
        """The first group steps aside; the others go on."""
        self.take(group)
        self._parked.append(list(group))

    def unpark(self, still_waits: Callable[[Sequence], bool]) -> None:
        """Those that need not wait any longer are the next, in their order."""
        for group in [group for group in self._parked if not still_waits(group[0])]:
            self._parked.remove(group)
            self._preempted.extend(group)

    def add(self, sequence: Sequence) -> None:
        self._new.add(sequence.request.client, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It was preempted; it is older than all that were put back before it."""
        self._preempted.appendleft(sequence)

    def first_group(self) -> list[Sequence]:
        return first_group(self._preempted or self._new.next_line())

    def take(self, group: Items[Sequence]) -> None:
        """The first group, or as many of it as find room."""
        if self._preempted:
            for _ in group:
                self._preempted.popleft()
        else:
            self._new.take(len(group))

    def remove(self, sequence: Sequence) -> None:
        group = next((group for group in self._parked if sequence in group), None)
        if group is not None:
            group.remove(sequence)
            self._parked = [group for group in self._parked if group]
        elif sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._new.remove(sequence.request.client, sequence)
