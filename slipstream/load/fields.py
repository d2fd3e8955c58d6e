"""Typed reading of one level of a model's description (config.json or GGUF metadata). Knows no model architecture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from slipstream.errors import CorruptFile, LoadError

MAX_SHOWN = 80  # letters of a value in a message
MAX_LAYERS = 4096  # protects from a damaged file that claims billions
MAX_CONTEXT = 1 << 40
MAX_FLOAT = sys.float_info.max  # JSON may hold larger whole numbers


def shown(value: object) -> str:
    """A value as messages quote it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class Fields:
    """A mapping whose values are checked as they are read; `where` names the file in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def raw(self, key: str) -> Any:
        """The value, or None when it is absent or null."""
        return self.values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number >= 1."""
        value = self._required(key, default)
        if type(value) is not int or value < 1:
            raise CorruptFile(f"{self.where}: {key} should be a whole number above 0, it is {shown(value)}.")
        return value

    def layers(self, key: str) -> int:
        """A number of layers that a model can have."""
        value = self.size(key)
        if value > MAX_LAYERS:
            raise CorruptFile(f"{self.where}: {key} should be at most {MAX_LAYERS}, it is {value}.")
        return value

    def context(self, key: str, default: int | None = None) -> int:
        """A number of tokens that a model can be made for."""
        value = self.size(key, default)
        if value > MAX_CONTEXT:
            raise CorruptFile(f"{self.where}: {key} should be at most {MAX_CONTEXT}, it is {shown(value)}.")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number >= 0."""
        value = self._required(key, default)
        if type(value) is not int or value < 0:
            raise CorruptFile(f"{self.where}: {key} should be a whole number, it is {shown(value)}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number > 0."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FLOAT:
            raise CorruptFile(f"{self.where}: {key} should be a number above 0, it is {shown(value)}.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise CorruptFile(f"{self.where}: {key} should be true or false, it is {shown(value)}.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise CorruptFile(f"{self.where}: {key} should be a string, it is {shown(value)}.")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.raw(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int or item < 0 for item in ids):
            raise CorruptFile(f"{self.where}: {key} should be token ids, it is {shown(value)}.")
        return tuple(ids)

    def level(self, key: str) -> Fields:
        """A nested object; empty when absent."""
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            raise CorruptFile(f"{self.where}: {key} should be an object, it is {shown(value)}.")
        return Fields(value or {}, f"{self.where}, {key}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise LoadError(f"{self.where} does not say {key!r}, which is needed to run the model.")
        return value
