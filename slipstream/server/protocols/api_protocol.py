"""The interface of a protocol: a request model, its translation, and a writer of responses, streamed or complete.

The endpoint drives every writer the same way; a writer knows nothing of sockets, engines or other protocols.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slipstream.config import EngineConfig
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError, openai_error
from slipstream.server.protocols.fields import SamplingFields
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.timings import Finish
from slipstream.server.text.json_text import compact
from slipstream.server.text.pieces import Piece

R = TypeVar("R", bound=SamplingFields)
DONE = "data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream"


class ApiWriter(ABC):
    """Streamed: `opening`, any number of `delta`, `ended` for each choice. Or `whole`."""

    keep_alive = ": keep-alive\n\n"
    warnings: Sequence[str] = ()
    # Known when the request is admitted.
    prompts: Sequence[Sequence[int]] = ()  # the token ids of each
    params: SamplingParams = SamplingParams()  # the model's defaults included

    def without_generation(self) -> dict[str, Any] | None:
        """The answer to a request that asks for no text, or None."""
        return None

    @abstractmethod
    def opening(self, num_prompt: int, num_cached: int) -> str:
        """Before the first token. ``num_cached``: 0 where nothing was computed yet."""

    @abstractmethod
    def delta(self, delta: ChoiceDelta) -> str: ...

    @abstractmethod
    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        """A choice has finished. ``total``: the sum over all choices, if it was the last one."""

    @abstractmethod
    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> Any:
        """The JSON of a complete answer."""

    def report(self, total: Finish) -> dict[str, Any]:
        """Fields beyond the protocols, at the end of every answer."""
        return {"timings": total.timings(), **with_warnings(self.warnings)}

    def failure(self, error: ApiError) -> str:
        """An error in a stream that has started."""
        return data(openai_error(error))


@dataclass(frozen=True, slots=True)
class ApiProtocol(Generic[R]):
    request_model: type[R]
    to_generation_request: Callable[[R, EngineConfig], GenerationRequest]
    writer: Callable[[R, str], ApiWriter]  # from the request and the model's name
    stream_type: str = EVENT_STREAM  # the content type of a stream


def with_warnings(warnings: Sequence[str]) -> dict[str, Any]:
    return {"warnings": list(warnings)} if warnings else {}


def data(value: object) -> str:
    return f"data: {compact(value)}\n\n"


def named(value: dict[str, Any]) -> str:
    """An event named by its type, as in /v1/messages and /v1/responses."""
    return f"event: {value['type']}\ndata: {compact(value)}\n\n"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    return int(time.time())


def origins(pieces: Iterable[Piece]) -> list[tuple[str, int]]:
    return [(piece.text, piece.origin) for piece in pieces if piece.text]


def error_field(finish: Finish) -> dict[str, str]:
    """The reason for finish reason "error". An extension: the protocols have no field for it."""
    return {"error": finish.error} if finish.error else {}


def openai_usage(total: Finish) -> dict[str, Any]:
    thinking = {"completion_tokens_details": {"reasoning_tokens": total.num_thinking}} if total.num_thinking else {}
    return {
        "prompt_tokens": total.num_prompt,
        "completion_tokens": total.num_output,
        "total_tokens": total.num_prompt + total.num_output,
        "prompt_tokens_details": {"cached_tokens": total.num_cached},
        **thinking,
    }
