"""The kinds of prompt that a client can send. prepare.py turns them into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]  # in the shape the chat template expects
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True  # add special tokens, such as BOS


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt
