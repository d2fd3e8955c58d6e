"""What a client gave as its prompt. How that becomes token ids is the work of prepare.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]  # as the model's template takes them
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special: bool = True  # what the model wants around a text, such as BOS


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt
