"""One running generation request: its choices, streamed as deltas or complete. The same for every protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slipstream.engine.async_engine import first_ready
from slipstream.server.errors import ApiError
from slipstream.server.service.choice import ChoiceDelta, ChoiceStream, FinishedChoice
from slipstream.server.service.timings import Finish, total
from slipstream.server.text.parts import Part, joined


class Generation:
    def __init__(
        self, choices: Sequence[ChoiceStream], prompts: Sequence[Sequence[int]], warnings: Sequence[str] = ()
    ) -> None:
        self.prompts = prompts  # token ids of each
        self.warnings = warnings
        self._choices = choices
        self._open = list(choices)

    @property
    def total(self) -> Finish | None:
        """The sum over all choices, once all are finished."""
        if self._open:
            return None
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        return total(finishes, len(self.prompts))

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_cached(self) -> int:
        """Of those, not computed again, as far as it is known. The first choice of a prompt computes it."""
        return sum(choice.num_cached for choice in self._choices[:: len(self._choices) // len(self.prompts)])

    async def next(self) -> list[ChoiceDelta]:
        """Waits for new deltas; returns none if `nudge` was called. The last delta of a choice has a finish."""
        while True:
            await first_ready([choice.stream for choice in self._open])
            if not any(choice.stream.has_events for choice in self._open):
                return []
            deltas = [delta for choice in self._open if (delta := choice.take()) is not None]
            self._open = [choice for choice in self._open if choice.finish is None]
            if deltas:
                return deltas

    async def whole(self) -> list[FinishedChoice]:
        """Waits for all choices to finish."""
        parts: list[list[Part]] = [[] for _ in self._choices]
        tokens: list[list[int]] = [[] for _ in self._choices]
        while self._open:
            for delta in await self.next():
                parts[delta.index] += delta.parts
                tokens[delta.index] += delta.tokens
        return [
            FinishedChoice(joined(parts[i]), choice.finish, tokens[i])
            for i, choice in enumerate(self._choices)
            if choice.finish is not None
        ]

    def nudge(self) -> None:
        for choice in self._open:
            choice.stream.nudge()

    def has_started(self, running: Collection[str]) -> bool:
        """Whether one of its streams is among the running ones or has had an event."""
        return any(choice.has_started or choice.stream.id in running for choice in self._choices)

    def abort(self, error: ApiError) -> None:
        """The reader of this generation then gets that error."""
        for choice in self._open:
            choice.abort(error)
