"""The scenario `agents`: recorded sessions of a coding agent, several at once, with shorter pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slipstream.bench.conversations.chat import ChatPrompt
from slipstream.bench.conversations.settings import TurnsSettings, request
from slipstream.bench.conversations.traces import Replay, Session
from slipstream.bench.harness.traffic import StreamLog, percentiles_ms, submit
from slipstream.engine.engine import Engine
from slipstream.engine.request import PromptCache
from slipstream.llm import LLM

PACE = 10.0  # pauses are so many times shorter than recorded
MAX_PAUSE = 3.0  # seconds


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """To one recorded request."""

    prompt: list[int]
    num_known: int  # tokens with which some earlier prompt of the session began, in blocks
    num_cached: int
    first_seconds: float
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class AgentsResult:
    sessions: int
    requests: int
    prompt_tokens: int
    hit_rate: float
    limit: float  # the hit rate if every block that came before were found again
    read_p50: int  # tokens of a prompt that were read
    read_p50_limit: int
    first_ms: dict[str, float]
    first_ms_off: dict[str, float]
    same_texts: int


class _Agent:
    """One session as the engine sees it: prompts with the answers that it gave."""

    def __init__(self, session: Session, vocab_size: int, settings: TurnsSettings) -> None:
        self.session, self.settings = session, settings
        self._vocab_size = vocab_size
        self._replay = Replay(session, self._block)

    def _block(self, block: int) -> list[int]:
        chance = random.Random(f"{self.settings.seed} {self.session.name} {block}")
        return chance.choices(range(self._vocab_size), k=self.session.block_size)

    def run(self, engine: Engine, before: Sequence[AgentAnswer] | None) -> list[AgentAnswer]:
        """``before``: these prompts again, without the cache."""
        answers = []
        for i, recorded in enumerate(self.session.requests):
            time.sleep(min(MAX_PAUSE, recorded.think_seconds / PACE))
            tokens = self._replay.prompt(i) if before is None else before[i].prompt
            log = self._ask(engine, tokens, recorded.agent, cached=before is None)
            self._replay.answered(i, log.tokens)
            known = self.session.limit[i]
            answers.append(AgentAnswer(tokens, known, log.stats.cached_tokens, log.first_seconds, log.tokens))
        return answers

    def _ask(self, engine: Engine, tokens: list[int], agent: int, *, cached: bool) -> StreamLog:
        system = self.session.num_system[agent]
        cache = PromptCache(salt=self.session.name, boundaries=((system, "system"), (len(tokens), "prompt")))
        log = submit(engine, request(ChatPrompt(tokens, cache), self.settings.new, cached=cached))
        log.wait()
        return log


def agents(llm: LLM, sessions: Sequence[Session], settings: TurnsSettings) -> AgentsResult:
    vocab_size = llm.engine.info.vocab_size
    crowd = [_Agent(session, vocab_size, settings) for session in sessions]
    with_cache = _run(llm.engine, crowd, [None] * len(crowd))
    without = _run(llm.engine, crowd, with_cache)
    answers = [answer for each in with_cache for answer in each]
    plain = [answer for each in without for answer in each]
    total = sum(len(answer.prompt) for answer in answers)
    return AgentsResult(
        len(crowd),
        len(answers),
        total,
        round(sum(answer.num_cached for answer in answers) / total, 4),
        round(sum(answer.num_known for answer in answers) / total, 4),
        _middle([len(answer.prompt) - answer.num_cached for answer in answers]),
        _middle([len(answer.prompt) - answer.num_known for answer in answers]),
        percentiles_ms([answer.first_seconds for answer in answers], (50, 90)),
        percentiles_ms([answer.first_seconds for answer in plain], (50, 90)),
        sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)),
    )


def _run(
    engine: Engine, crowd: Sequence[_Agent], before: Sequence[Sequence[AgentAnswer] | None]
) -> list[list[AgentAnswer]]:
    with ThreadPoolExecutor(len(crowd)) as threads:
        return list(threads.map(lambda agent, earlier: agent.run(engine, earlier), crowd, before))


def _middle(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
