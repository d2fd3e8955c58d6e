"""What a protocol is: a request it reads, and a writer that tells one answer in its words, streamed or whole.

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
from slipstream.server.errors import ApiError, as_openai
from slipstream.server.protocols.fields import Sampled
from slipstream.server.service.choice import Answer, Delta
from slipstream.server.service.generation_request import Job
from slipstream.server.service.timings import Finish
from slipstream.server.text.json_text import compact
from slipstream.server.text.pieces import Piece

R = TypeVar("R", bound=Sampled)


class Writer(ABC):
    """Server-sent events as text: `opening`, some `delta`, `ended` for each choice. Or `whole`."""

    keep_alive = ": keep-alive\n\n"

    @abstractmethod
    def opening(self, num_prompt: int) -> str:
        """Before the first token."""

    @abstractmethod
    def delta(self, delta: Delta) -> str: ...

    @abstractmethod
    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        """A choice is over; ``total``: it was the last one, and this is what all of them took."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer], total: Finish) -> dict[str, Any]: ...

    def failure(self, error: ApiError) -> str:
        """In a stream that has begun."""
        return data(as_openai(error))


@dataclass(frozen=True, slots=True)
class Protocol(Generic[R]):
    request: type[R]
    job: Callable[[R, EngineConfig], Job]
    writer: Callable[[R, str], Writer]  # the request, and the model's name


def data(value: object) -> str:
    return f"data: {compact(value)}\n\n"


def named(value: dict[str, Any]) -> str:
    """An event whose name is its own type, as Anthropic's and OpenAI's newer streams have it."""
    return f"event: {value['type']}\ndata: {compact(value)}\n\n"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    return int(time.time())


def origins(pieces: Iterable[Piece]) -> list[tuple[str, int]]:
    return [(piece.text, piece.origin) for piece in pieces if piece.text]


def fault(finish: Finish) -> dict[str, str]:
    """Why an answer could not go on, for whoever looks; the protocols have no place for it."""
    return {"error": finish.error} if finish.error else {}


def openai_usage(total: Finish) -> dict[str, Any]:
    thinking = {"completion_tokens_details": {"reasoning_tokens": total.num_thinking}} if total.num_thinking else {}
    return {
        "prompt_tokens": total.num_prompt,
        "completion_tokens": total.num_output,
        "total_tokens": total.num_prompt + total.num_output,
        **thinking,
    }
