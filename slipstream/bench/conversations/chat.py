"""A conversation of a coding agent as tokens: what each turn repeats, adds and leaves out.

A person writes, the model answers and calls tools, and each result comes back in a further turn. The thinking of
answers stays in the prompt until the person writes again, as in the chat templates of models that think.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.bench.harness.workload import random_prompt
from slipstream.engine.request import PromptCache
from slipstream.llm import LLM

Kind = Literal["system", "user", "tool", "answer"]
Words = Callable[[int], list[int]]  # so many tokens, others at each call
MARKED = 4  # tokens around a message: its role, where thinking begins
ANSWER = 2  # of them, before an answer without thinking


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    tokens: tuple[int, ...]
    num_thinking: int = 0  # the first ones of an answer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    tokens: list[int]
    cache: PromptCache  # with the boundaries of this prompt


class Conversation:
    def __init__(self, system: Sequence[int], salt: str = "") -> None:
        self.messages = [Message("system", tuple(system))]
        self._salt = salt

    def add(self, kind: Kind, tokens: Sequence[int]) -> None:
        """After a message of the user no earlier answer has its thinking any more."""
        if kind == "user":
            self.messages = [_without_thinking(each) for each in self.messages]
        self.messages.append(Message(kind, tuple(tokens), len(tokens) // 2 if kind == "answer" else 0))

    def prompt(self) -> ChatPrompt:
        tokens: list[int] = []
        ends: dict[str, int] = {}
        for message in self.messages:
            marks = ANSWER if message.kind == "answer" and not message.num_thinking else MARKED
            tokens += (*range(marks), *message.tokens)
            ends[message.kind] = len(tokens)
        boundaries = ((ends["system"], "system"), (ends.get("user", 0), "user"), (len(tokens), "prompt"))
        return ChatPrompt([*tokens, *range(MARKED)], PromptCache(salt=self._salt, boundaries=boundaries))  # type: ignore[arg-type]


def _without_thinking(message: Message) -> Message:
    return replace(message, tokens=message.tokens[message.num_thinking :], num_thinking=0)


def words_of(llm: LLM, seed: int) -> Words:
    """Text where the model has any, from a place by chance; else random ids."""
    chance = random.Random(seed)
    if not llm.tokenizer.has_chat_template:
        vocab_size = llm.engine.info.vocab_size
        return lambda count: random_prompt(count, vocab_size, chance.randrange(1 << 30))
    text = llm.tokenizer.encode("\n\n".join(MTP_BENCH_PROMPTS.values()))

    def words(count: int) -> list[int]:
        """Nobody else's: a random token comes first."""
        pieces = [chance.choice(text)]
        while len(pieces) < count:
            start = chance.randrange(len(text))
            pieces += text[start : start + 64]
        return pieces[:count]

    return words
