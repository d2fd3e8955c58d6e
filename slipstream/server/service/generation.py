"""One request on its way: its choices, told as they come or whole. Every protocol reads this."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.async_engine import first_ready
from slipstream.server.service.choice import Answer, Choice, Delta
from slipstream.server.service.timings import Finish, total
from slipstream.server.text.parts import Part, joined


class Generation:
    def __init__(self, choices: Sequence[Choice], num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._choices = choices
        self._open = list(choices)

    @property
    def total(self) -> Finish | None:
        """Of all choices, once none is on its way any more."""
        if self._open:
            return None
        return total([choice.finish for choice in self._choices if choice.finish is not None])

    async def next(self) -> list[Delta]:
        """Waits for something to tell; nothing if it was nudged before. The last delta of a choice has a finish."""
        while True:
            await first_ready([choice.stream for choice in self._open])
            if not any(choice.stream.has_events for choice in self._open):
                return []
            deltas = [delta for choice in self._open if (delta := choice.take()) is not None]
            self._open = [choice for choice in self._open if choice.finish is None]
            if deltas:
                return deltas

    async def whole(self) -> list[Answer]:
        """Everything at once."""
        parts: list[list[Part]] = [[] for _ in self._choices]
        while self._open:
            for delta in await self.next():
                parts[delta.index] += delta.parts
        return [
            Answer(joined(told), choice.finish)
            for told, choice in zip(parts, self._choices)
            if choice.finish is not None
        ]

    def nudge(self) -> None:
        for choice in self._open:
            choice.stream.nudge()

    def abort(self) -> None:
        """Whoever reads this is then told that the server is shutting down."""
        for choice in self._open:
            choice.stream.end("abort")
