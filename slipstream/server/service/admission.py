"""Who gets in when there is not room for all: places in the engine, and turns on worker threads.

Both are shared fairly between clients. Where nothing is free, a newcomer gets in at the cost of the client that has
most: the newest request of that client that has not started is refused (429).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.engine.waiting import RoundRobin
from slipstream.server.errors import ApiError
from slipstream.server.service.generation import Generation

Refusal = Callable[[], ApiError]
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Place:
    """A request in the engine."""

    client: str
    num: int  # its choices
    generation: Generation | None = field(default=None)


class Places:
    """At most ``limit`` choices in the engine, running or waiting. ``running``: ids of the streams that run."""

    def __init__(self, limit: int, refusal: Refusal, running: Callable[[], Iterable[str]]) -> None:
        self._limit, self._refusal, self._running = limit, refusal, running
        self._places: list[Place] = []  # the newest last

    def check(self, client: str, num: int) -> None:
        """Raises the refusal if `take` would."""
        self._victims(client, num)

    @contextmanager
    def taken(self, client: str, num: int) -> Iterator[Place]:
        for victim in self._victims(client, num):
            self._places.remove(victim)
            assert victim.generation is not None
            victim.generation.abort(self._refusal())
        place = Place(client, num)
        self._places.append(place)
        try:
            yield place
        finally:
            if place in self._places:
                self._places.remove(place)

    def _victims(self, client: str, num: int) -> list[Place]:
        """Waiting requests that are to leave for a new one. None of their clients keeps less than the new one gets."""
        held: Counter[str] = Counter()
        for place in self._places:
            held[place.client] += place.num
        free = self._limit - held.total()
        if free >= num:
            return []
        waiting = self._waiting()
        victims: list[Place] = []
        share = held[client] + num
        while free < num:
            able = [place for place in waiting if held[place.client] - place.num >= share]
            if not able:
                raise self._refusal()
            victim = max(able, key=lambda place: held[place.client])
            waiting.remove(victim)
            victims.append(victim)
            held[victim.client] -= victim.num
            free += victim.num
        return victims

    def _waiting(self) -> list[Place]:
        """The newest first."""
        running = set(self._running())
        return [
            place
            for place in reversed(self._places)
            if place.generation is not None and not place.generation.has_started(running)
        ]


class FairThreads:
    """Worker threads. Work that finds none free waits, at most ``limit`` pieces of it, by client in turn."""

    def __init__(
        self, count: int, name: str, limit: int, refusal: Refusal, initializer: Callable[[], None] | None = None
    ) -> None:
        self._threads = ThreadPoolExecutor(count, name, initializer)
        self._num_free = count
        self._limit, self._refusal = limit, refusal
        self._line: RoundRobin[asyncio.Future[None]] = RoundRobin()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Cancelling it does not end work that has begun: its thread is free when the work is done."""
        await self._turn(client)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._done)
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        self._make_room(client)
        turn = asyncio.get_running_loop().create_future()
        self._line.add(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.remove(client, turn)
            elif turn.exception() is None:
                self._pass_on()
            raise

    def _make_room(self, client: str) -> None:
        if len(self._line) < self._limit:
            return
        greediest, num_waiting = self._line.longest() if self._line else ("", 0)
        if num_waiting <= self._line.count(client) + 1:
            raise self._refusal()
        self._line.pop_newest(greediest).set_exception(self._refusal())

    def _done(self, work: asyncio.Future[Any]) -> None:
        if not work.cancelled():
            work.exception()  # seen, also where nobody waits for it any more
        self._pass_on()

    def _pass_on(self) -> None:
        if self._line:
            [turn] = self._line.take()
            turn.set_result(None)
        else:
            self._num_free += 1
