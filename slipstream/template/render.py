"""A model's chat template: messages -> prompt text, in Jinja's sandbox. Knows nothing of token ids.

A failure inside the template is an answer too, in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20  # bytes, beyond those of the process at its start
MAX_TEXT = 16 << 20  # characters
MAX_REASON = 500  # characters
Kind = Literal["broken", "limit", "message"]


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TooLong(Exception):
    """The template writes more than a prompt can be."""


class Renderer:
    """`sources` by name: "default", and possibly "tool_use" for requests with tools."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens

    def __call__(self, variables: dict[str, Any]) -> dict[str, str]:
        """`{"text": prompt}` or `{"error": sentence, "kind": kind}`. A template that is "broken" fails on everything;
        after the other kinds it may do well with other messages."""
        try:
            return {"text": "".join(self._pieces({**self._special_tokens, **variables}))}
        except jinja2.TemplateSyntaxError as error:
            return _failure(f"cannot be used, line {error.lineno}: {error.message}", "broken")
        except jinja2.TemplateError as error:
            return _failure(f"refused the request: {error.message or error}")
        except MemoryError:
            return _failure(f"takes more than {MEMORY >> 20} MB of memory.", "limit")
        except TooLong:
            return _failure(f"writes more than {MAX_TEXT >> 20} million characters.", "limit")
        except Exception as error:  # an expression that was not written for these messages
            return _failure(f"failed on these messages: {error or type(error).__name__}")

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        environment = _environment()
        return {name: environment.from_string(source) for name, source in self._sources.items()}

    def _pieces(self, variables: dict[str, Any]) -> Iterator[str]:
        length = 0
        for piece in self._choose(bool(variables["tools"])).generate(variables):
            length += len(piece)
            if length > MAX_TEXT:
                raise TooLong
            yield piece

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._sources:
            return self._compiled["tool_use"]
        name = "default" if "default" in self._sources else next(iter(self._sources))
        return self._compiled[name]


def _failure(what: str, kind: Kind = "message") -> dict[str, str]:
    return {"error": f"The model's chat template {what[:MAX_REASON]}", "kind": kind}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, indent=indent, separators=separators, sort_keys=sort_keys, ensure_ascii=ensure_ascii)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
