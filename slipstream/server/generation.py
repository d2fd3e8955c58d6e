"""One answer on its way: engine events in, deltas of text out, an account at the end. Every protocol reads this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.async_engine import TokenStream
from slipstream.engine.request import TokenEvent
from slipstream.engine.stats import RequestStats
from slipstream.load import Tokenizer
from slipstream.sampling import SamplingParams
from slipstream.server.errors import engine_failed, shutting_down
from slipstream.server.metrics import Latencies
from slipstream.server.output import OutputText, Piece
from slipstream.server.prompts import Prompt
from slipstream.server.timings import Finish


@dataclass(frozen=True, slots=True)
class Job:
    """What a request asks for, whatever its protocol."""

    prompt: Prompt
    params: SamplingParams
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one: possibly several tokens of several steps."""

    pieces: Sequence[Piece]
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


class Generation:
    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer,
        num_prompt: int,
        stops: Sequence[str],
        latencies: Latencies,
    ) -> None:
        self.num_prompt = num_prompt
        self._stream = stream
        self._output = OutputText(tokenizer, stops)
        self._latencies = latencies

    async def next(self) -> Delta | None:
        """Waits for something to tell; None if it was nudged before. The last delta has a finish."""
        while True:
            await self._stream.ready()
            events = self._stream.take()
            if not events:
                return None
            if delta := self._delta(events):
                return delta

    async def whole(self) -> Delta:
        """Everything at once."""
        pieces: list[Piece] = []
        while True:
            delta = await self.next()
            if delta is not None:
                pieces += delta.pieces
                if delta.finish is not None:
                    return Delta(pieces, delta.finish)

    def nudge(self) -> None:
        self._stream.nudge()

    def abort(self) -> None:
        """Whoever reads this is then told that the server is shutting down."""
        self._stream.end("abort")

    def _delta(self, events: list[TokenEvent]) -> Delta | None:
        """None while there is nothing to see of them: half a character, or what may become a stop string."""
        pieces: list[Piece] = []
        for event in events:
            self._latencies.see(event)
            pieces += self._take(event)
            if event.finish_reason is not None:
                return Delta(pieces, self._finish(event))
        return Delta(pieces) if pieces else None

    def _take(self, event: TokenEvent) -> list[Piece]:
        if self._output.stop is not None:
            return []  # a stop string was found; only the final event counts
        ended = event.finish_reason == "stop" and bool(event.tokens)
        tokens = event.tokens[:-1] if ended else event.tokens
        pieces = self._output.push(tokens, event.origins)
        if self._output.stop is None and ended:
            self._output.count_end()
        if self._output.stop is None and event.finish_reason is not None:
            pieces += self._output.finish()
        if self._output.stop is not None and event.finish_reason is None:
            self._stream.end("stop")
        return pieces

    def _finish(self, event: TokenEvent) -> Finish:
        reason, stop = event.finish_reason, self._output.stop
        if reason == "error":
            raise engine_failed()
        if reason == "abort" and stop is None:
            raise shutting_down()
        assert isinstance(event.stats, RequestStats)
        by_length = reason == "length" and stop is None
        return Finish("length" if by_length else "stop", stop, self.num_prompt, self._output.num_tokens, event.stats)
