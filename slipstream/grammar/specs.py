"""The formats that a client may demand of its output, and the bounds of what we compile.

A spec becomes a Source: a kind and one text. Bounds are checked here, before the text is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from slipstream.errors import GrammarError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64  # of a schema
MAX_ALTERNATIVES = 10_000  # of a whole spec
MAX_REPEATS = 10_000  # in a pattern: x{n}

Kind = Literal["json", "lenient_json", "regex", "lark", "gbnf"]
_COUNTS = re.compile(r"(?<!\\)\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_OPTIONS = ("enum", "anyOf", "oneOf", "allOf")


class Source(NamedTuple):
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""

    name: ClassVar[str] = "json_object"

    def source(self, where: str) -> Source:
        return Source("json", '{"type":"object"}')


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema describes. ``lenient``: keywords we cannot enforce are passed over instead of refused."""

    name: ClassVar[str] = "schema"
    schema: Mapping[str, Any] | bool = field(hash=False)
    lenient: bool = False

    def source(self, where: str) -> Source:
        try:
            text = json.dumps(self.schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"{where}: {_first_line(error)}") from error
        _check_size(text, where)
        _check_schema(self.schema, where)
        return Source("lenient_json" if self.lenient else "json", text)


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that the pattern matches from its first character to its last."""

    name: ClassVar[str] = "regex"
    pattern: str

    def source(self, where: str) -> Source:
        return Source("regex", _checked(self.pattern, where))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts."""

    name: ClassVar[str] = "choice"
    options: Sequence[str]

    def source(self, where: str) -> Source:
        if not self.options or not all(isinstance(option, str) and option for option in self.options):
            raise GrammarError(f"{where}: needs texts to choose from, none of them empty")
        _check_alternatives(len(self.options), where)
        text = " | ".join(json.dumps(option, ensure_ascii=False) for option in self.options)
        _check_size(text, where)
        return Source("lark", f"start: OPTION\nOPTION: {text}")


@dataclass(frozen=True, slots=True)
class Lark:
    """A grammar in llguidance's dialect of Lark."""

    name: ClassVar[str] = "grammar"
    grammar: str

    def source(self, where: str) -> Source:
        return Source("lark", _checked(self.grammar, where))


@dataclass(frozen=True, slots=True)
class Gbnf:
    """A grammar as llama.cpp writes them."""

    name: ClassVar[str] = "grammar"
    grammar: str

    def source(self, where: str) -> Source:
        return Source("gbnf", _checked(self.grammar, where))


Spec = JsonObject | JsonSchema | Regex | Choice | Lark | Gbnf


def _checked(text: object, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise GrammarError(f"{where}: should be a text that is not empty")
    _check_size(text, where)
    _check_alternatives(text.count("|"), where)
    _check_repeats(text, where)
    return text


def _check_size(text: str, where: str) -> None:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise GrammarError(f"{where}: has {size} bytes, at most {MAX_BYTES} are compiled")


def _check_alternatives(count: int, where: str) -> None:
    if count > MAX_ALTERNATIVES:
        raise GrammarError(f"{where}: has {count} alternatives, at most {MAX_ALTERNATIVES} are compiled")


def _check_repeats(pattern: str, where: str) -> None:
    largest = max((int(number) for pair in _COUNTS.findall(pattern) for number in pair if number), default=0)
    if largest > MAX_REPEATS:
        raise GrammarError(f"{where}: repeats something {largest} times, at most {MAX_REPEATS} are compiled")


def _check_schema(schema: object, where: str) -> None:
    """Depth, alternatives, patterns; without recursion; an error names the path."""
    num_alternatives = 0
    left = [(schema, where, 1)]
    while left:
        node, at, depth = left.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"{at}: nested more than {MAX_DEPTH} deep")
        if isinstance(node, Mapping):
            num_alternatives += sum(len(node[key]) for key in _OPTIONS if isinstance(node.get(key), list))
            _check_alternatives(num_alternatives, at)
            if isinstance(node.get("pattern"), str):
                _check_repeats(node["pattern"], f"{at}.pattern")
        left += [(child, f"{at}{step}", depth + 1) for step, child in children(node)]


def children(node: object) -> Iterator[tuple[str, object]]:
    """The objects and lists inside a piece of JSON, each with the step to it as error messages write it."""
    if isinstance(node, Mapping):
        yield from ((f".{key}", child) for key, child in node.items() if isinstance(child, (Mapping, list)))
    elif isinstance(node, list):
        yield from ((f"[{i}]", child) for i, child in enumerate(node) if isinstance(child, (Mapping, list)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
