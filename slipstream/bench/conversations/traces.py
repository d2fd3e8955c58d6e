"""Recorded sessions of a coding agent, as ids of blocks of 64 tokens: a sample of public traces (README.md).

Equal ids are equal tokens after equal ids. Which tokens is not known, so they are made up.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parent / "agent_sample.json.gz"
TRACE_BLOCK = 64  # tokens
BlockTokens = Callable[[int], Sequence[int]]  # the tokens of a block, by its id; negative: a block that nobody shares


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at: float  # seconds after the session began
    think_seconds: float  # from the answer before it to this request
    num_prompt: int  # tokens
    num_output: int
    blocks: tuple[int, ...]  # of the prompt, full ones only
    agent: int = 0  # 0: the session's own thread; else one that it started
    from_user: bool = False  # what is new was written by a person, at least in part


@dataclass(frozen=True)
class Session:
    name: str
    num_system: tuple[int, ...]  # tokens of tools and system message, by agent
    requests: tuple[TraceRequest, ...]
    block_size: int = TRACE_BLOCK  # tokens

    def shrunk(self, factor: int, max_prompt: int, count: int) -> Session:
        """Its first requests, up to the first that is still too long, with so many times fewer tokens."""
        size = self.block_size // factor
        requests: list[TraceRequest] = []
        for each in self.requests[:count]:
            num_prompt = max(1, len(each.blocks) * size + each.num_prompt % self.block_size // factor)
            if num_prompt > max_prompt:
                break
            requests.append(replace(each, num_prompt=num_prompt, num_output=each.num_output // factor))
        return Session(self.name, tuple(each // factor for each in self.num_system), tuple(requests), size)

    @cached_property
    def limit(self) -> tuple[int, ...]:
        """For each request the tokens, in whole blocks, with which some earlier request began."""
        known: dict[int, Any] = {}
        found = []
        for request in self.requests:
            at, num_known, new = known, 0, False
            for block in request.blocks:
                new = new or block not in at
                num_known += not new
                at = at.setdefault(block, {})
            found.append(self.block_size * num_known)
        return tuple(found)

    @cached_property
    def continued_by(self) -> tuple[int | None, ...]:
        """For each request the first later one whose prompt begins with all its blocks and goes on."""
        found: list[int | None] = []
        for i, request in enumerate(self.requests):
            num_blocks = len(request.blocks)
            later = range(i + 1, len(self.requests))
            found.append(next((j for j in later if _goes_on(request, self.requests[j], num_blocks)), None))
        return tuple(found)


def _goes_on(request: TraceRequest, later: TraceRequest, num_blocks: int) -> bool:
    return len(later.blocks) > num_blocks and later.blocks[:num_blocks] == request.blocks


class Replay:
    """The prompts of a session as tokens.

    A prompt ends within a block. The tokens there, and the answer after them, are those with which the request that
    goes on from it continues; where there is none, they are its own.
    """

    def __init__(self, session: Session, block_tokens: BlockTokens) -> None:
        self.session = session
        self._block_tokens = block_tokens
        self._changed: dict[int, list[int]] = {}

    def prompt(self, index: int) -> list[int]:
        request = self.session.requests[index]
        return self._tokens(index, request.num_prompt)

    def whole(self, index: int) -> list[int]:
        """The prompt and the answer."""
        request = self.session.requests[index]
        return self._tokens(index, request.num_prompt + request.num_output)

    def answered(self, index: int, tokens: Sequence[int]) -> None:
        """This was the answer: the request that goes on from there has it."""
        start, after = self.session.requests[index].num_prompt, self._after(index)
        for position, token in enumerate(tokens, start):
            place, offset = divmod(position, self.session.block_size)
            if place >= len(after):
                return
            block = after[place]
            self._changed.setdefault(block, list(self._block_tokens(block)))[offset] = token

    def _after(self, index: int) -> Sequence[int]:
        """The blocks of the prompt and those that follow."""
        later = self.session.continued_by[index]
        return self.session.requests[index if later is None else later].blocks

    def _tokens(self, index: int, count: int) -> list[int]:
        blocks = self._after(index)
        num_blocks = -(-count // self.session.block_size)
        own = range(-1 - 1000 * index, -1 - 1000 * index - max(0, num_blocks - len(blocks)), -1)
        tokens: list[int] = []
        for block in (*blocks[:num_blocks], *own):
            tokens += self._changed.get(block) or self._block_tokens(block)
        return tokens[:count]


def load_sessions(path: Path = SAMPLE) -> list[Session]:
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    return [_session(each) for each in data["sessions"]]


def _session(data: dict[str, Any]) -> Session:
    requests: list[TraceRequest] = []
    for each in data["requests"]:
        new = [block for first, count in each["new"] for block in range(first, first + count)]
        same = requests[each["same_as"]].blocks[: each["num_same"]] if each["num_same"] else ()
        counts = (each["at"], each["think"], each["in"], each["out"])
        requests.append(TraceRequest(*counts, (*same, *new), each.get("agent", 0), each.get("user", False)))
    return Session(data["name"], tuple(data["system"]), tuple(requests))
