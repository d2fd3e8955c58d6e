"""Recorded agent sessions against the real prefix cache and its rules, without a model: who starts where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from slipstream.bench.conversations.traces import Replay, Session
from slipstream.cache.manager import CacheManager, RowDemand
from slipstream.config import EngineConfig
from slipstream.engine.contract import RunnerInfo
from slipstream.engine.prefix_sharing import PrefixSharing
from slipstream.engine.request import Boundary, PromptCache, Request
from slipstream.engine.request import Sequence as Row
from slipstream.sampling import SamplingParams

BLOCK = 16
GRID = 32  # as on a GPU
PROMPT_STEP = 2048  # tokens of a prompt in one step, as on a GPU
OUTPUT_STEP = 16  # tokens generated at once: fewer only take longer
STATE_TOKENS = 154e6 / 69.6e3  # of a 27B model: a state is as large as the KV of so many


def block_tokens(block: int) -> list[int]:
    """Blocks that differ seldom differ in their very first token."""
    return [0, *range(64 * block + 1, 64 * block + 64)]


@dataclass
class Outcome:
    num_prompt: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)  # tokens read if each block that came before were found

    @property
    def hit_rate(self) -> float:
        return 1 - sum(self.read) / sum(self.num_prompt)

    @property
    def of_limit(self) -> float:
        """The hit rate over that of the limit."""
        return self.hit_rate / (1 - sum(self.limit) / sum(self.num_prompt))

    @property
    def mean_of_limit(self) -> float:
        """Tokens read, in the mean, over those of the limit."""
        return mean(self.read) / mean(self.limit)

    @property
    def median_read(self) -> float:
        return median(self.read)


class CachingEngine:
    """Requests one after the other."""

    def __init__(self, num_tokens: int, state_share: float) -> None:
        """Room for so many tokens. ``state_share``: memory for states next to that for KV; 0: no layer is recurrent."""
        num_blocks, num_states = num_tokens // BLOCK, int(state_share * num_tokens / STATE_TOKENS)
        info = RunnerInfo(1, num_blocks, BLOCK, 10**9, 1 << 60, 4, keep_grid=GRID, num_states=num_states)
        self.cache = CacheManager(num_blocks, BLOCK, 1, num_states)
        self.sharing = PrefixSharing(info, EngineConfig(), self.cache)
        self._count = 0

    def serve(self, prompt: list[int], output: Sequence[int], how: PromptCache) -> int:
        """Tokens that were cached."""
        self._count += 1
        request = Request(f"r{self._count}", tuple(prompt), SamplingParams(), 0, 0.0, cache=how)
        row = Row(request, len(prompt) + len(output))
        found = self.sharing.find(row, True)
        num_cached = self.cache.admit(RowDemand(row.id, row.limit, found=found))
        self.sharing.admitted(row, found, num_cached, True)
        start = self.cache.start(row.id)
        self.sharing.started(row, start, False)
        row.num_computed = row.num_in_state = start.num_computed
        self._compute(row, PROMPT_STEP)
        for i in range(0, len(output), OUTPUT_STEP):
            row.tokens += output[i : i + OUTPUT_STEP]
            self._compute(row, OUTPUT_STEP)
        self.sharing.left(row)
        self.cache.release(row.id)
        return start.num_computed

    def _compute(self, row: Row, step: int) -> None:
        """All known tokens but the last, which the next step would feed."""
        while row.num_uncomputed > 1:
            feed = min(step, row.num_uncomputed - 1)
            self.sharing.keeps(row, row.bounds, feed)
            row.num_computed += feed
            row.num_in_state = row.num_computed
            self.sharing.committed(row)


@dataclass(frozen=True)
class Thread:
    """A session on its way."""

    session: Session
    replay: Replay
    user_ends: dict[int, int]  # by agent: the end of the last prompt that a person wrote to

    @classmethod
    def of(cls, session: Session) -> Thread:
        return cls(session, Replay(session, block_tokens), {})


def serve(engine: CachingEngine, thread: Thread, index: int, outcome: Outcome) -> None:
    request = thread.session.requests[index]
    if request.from_user:
        thread.user_ends[request.agent] = request.num_prompt
    whole = thread.replay.whole(index)
    prompt, output = whole[: request.num_prompt], whole[request.num_prompt :]
    boundaries = tuple(_boundaries(thread, index))
    cached = engine.serve(prompt, output, PromptCache(salt=thread.session.name, boundaries=boundaries))
    outcome.num_prompt.append(request.num_prompt)
    outcome.read.append(request.num_prompt - cached)
    outcome.limit.append(request.num_prompt - thread.session.limit[index])


def _boundaries(thread: Thread, index: int) -> Iterator[tuple[int, Boundary]]:
    request = thread.session.requests[index]
    yield min(thread.session.num_system[request.agent], request.num_prompt), "system"
    yield min(thread.user_ends.get(request.agent, 0), request.num_prompt), "user"
    yield request.num_prompt, "prompt"


def together(sessions: Sequence[Session], engine: CachingEngine) -> Outcome:
    """All begin at once, and their requests come in the order in which they were recorded."""
    outcome = Outcome()
    threads = [Thread.of(session) for session in sessions]
    order = sorted((r.at, n, i) for n, session in enumerate(sessions) for i, r in enumerate(session.requests))
    for _, number, index in order:
        serve(engine, threads[number], index, outcome)
    return outcome
