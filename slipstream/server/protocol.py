"""What a protocol is: a request it reads, and a writer that tells one answer in its words, streamed or whole.

The endpoint drives every writer the same way; a writer knows nothing of sockets, engines or other protocols.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slipstream.config import EngineConfig
from slipstream.server.errors import ApiError, as_openai
from slipstream.server.fields import Sampled
from slipstream.server.generation import Delta, Job
from slipstream.server.timings import Finish
from slipstream.server.wire import compact

R = TypeVar("R", bound=Sampled)


class Writer(ABC):
    """Server-sent events as text: `opening`, some `delta`, `closing`. Or `whole`."""

    keep_alive = ": keep-alive\n\n"

    @abstractmethod
    def opening(self, num_prompt: int) -> str:
        """Before the first token."""

    @abstractmethod
    def delta(self, delta: Delta) -> str: ...

    @abstractmethod
    def closing(self, finish: Finish) -> str: ...

    @abstractmethod
    def whole(self, delta: Delta, finish: Finish) -> dict[str, Any]: ...

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


def openai_usage(finish: Finish) -> dict[str, int]:
    return {
        "prompt_tokens": finish.num_prompt,
        "completion_tokens": finish.num_output,
        "total_tokens": finish.num_prompt + finish.num_output,
    }
