"""Who sent the request that the running task serves, and what its line in the access log will say."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Caller:
    client: str = ""  # API key or address: clients take turns, see admission.py
    key: str = ""  # a hash of the API key, if one is needed
    request_id: str = ""
    num_prompt: int | None = None  # tokens, once they are known
    num_output: int | None = None
    error: str = ""  # why the request failed


_CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Of the running task; a task that serves no HTTP request has a nameless one."""
    found = _CALLER.get(None)
    return Caller() if found is None else found


def enter(found: Caller) -> None:
    """For the running task and those that it starts."""
    _CALLER.set(found)
