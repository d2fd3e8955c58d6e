"""The kinds of prompt that a client can send. prepare.py turns them into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prefill:
    """The beginning of the answer, which the model continues."""

    content: str
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]  # in the shape the chat template expects
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    prefill: Prefill | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True  # add special tokens, such as BOS
    allow_special: bool = True  # read <|x|> in the text as a token


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """Texts and token ids, one after the other."""

    parts: Sequence[str | int]
    add_special: bool = True  # if the first part is a text
    allow_special: bool = True


def chat_prompt(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], continued: bool) -> ChatPrompt:
    """``continued``: the last message is the assistant's and is continued, unless it has tool calls."""
    last = messages[-1]
    if not continued or "tool_calls" in last:
        return ChatPrompt(messages, variables)
    return ChatPrompt(messages[:-1], variables, Prefill(last["content"], last.get("reasoning_content", "")))


Prompt = ChatPrompt | TextPrompt | TokenPrompt | MixedPrompt
