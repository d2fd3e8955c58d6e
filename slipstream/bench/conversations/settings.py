"""What `slipstream bench turns` can be asked for, and the two ways in which it asks: with and without the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.bench.conversations.chat import ChatPrompt
from slipstream.bench.harness.traffic import NO_CACHE, StreamLog, StreamRequest, run_together
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.sampling import SamplingParams

AGENTS, RESTART = "agents", "restart"
SCENARIOS = ("turns", "edit", "fan-out", AGENTS, "cold", RESTART)
SUFFIX = 64  # tokens with which the prompts of a fan-out differ


@dataclass(frozen=True, slots=True)
class TurnsSettings:
    scenarios: Sequence[str] = SCENARIOS
    prompt: int = 2048  # tokens of the first prompt, of the shared prefix, of a prompt that nobody shares
    turns: int = 10
    added: tuple[int, int] = (100, 300)  # tokens of each further message
    new: int = 32  # tokens of each answer
    streams: int = 8  # at once, in fan-out and cold
    sessions: int = 4  # of agents, at once
    requests: int = 8  # of each session
    shrink: int = 16  # a prompt of an agent has so many times fewer tokens than recorded
    repeats: int = 3  # rounds of fan-out and cold
    peer: bool = False  # llama.cpp beside us, in turns
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := set(self.scenarios) - set(SCENARIOS):
            raise ConfigError(f"there is no scenario {', '.join(sorted(unknown))}: choose from {', '.join(SCENARIOS)}")
        counts = (self.turns, self.new, self.streams, self.sessions, self.requests, self.repeats)
        if min(counts) < 1 or self.prompt < 64:
            raise ConfigError("prompt must be at least 64, all other numbers at least 1")
        if self.shrink not in (1, 2, 4, 8, 16, 32, 64):
            raise ConfigError("shrink must be a power of two up to 64: a recorded block has 64 tokens")
        if self.peer and "turns" not in self.scenarios:
            raise ConfigError("--peer belongs to the scenario turns")

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, marks around messages included."""
        turn = self.added[1] + self.new + 16
        num_turns = max(1, self.turns if "turns" in self.scenarios else 0, 3 if RESTART in self.scenarios else 0)
        return self.prompt + max(SUFFIX + self.new, num_turns * turn)


def request(prompt: ChatPrompt, num_new: int, *, cached: bool) -> StreamRequest:
    params = SamplingParams(0.0, seed=0, max_tokens=num_new, ignore_eos=True)
    return StreamRequest(prompt.tokens, params, prompt.cache if cached else NO_CACHE)


def ask(engine: Engine, prompt: ChatPrompt, num_new: int, *, cached: bool) -> StreamLog:
    [log] = run_together(engine, [request(prompt, num_new, cached=cached)])
    return log


def alternating(turn: int) -> tuple[bool, bool]:
    """With and without the cache, another one first each time."""
    return (True, False) if turn % 2 else (False, True)


def milliseconds(log: StreamLog) -> float:
    return round(1e3 * log.first_seconds, 2)
