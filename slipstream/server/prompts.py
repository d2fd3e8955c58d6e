"""What a client gave as its prompt, and how that becomes token ids. Run in a worker thread: texts may be long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.load import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]  # as the model's template takes them


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True  # what the model wants around a text, such as BOS


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    match prompt:
        case ChatPrompt(messages):
            return tokenizer.chat(messages)
        case TextPrompt(text, add_special):
            return tokenizer.encode(text, add_special=add_special)
        case TokenPrompt(tokens):
            return list(tokens)
