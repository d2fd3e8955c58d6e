"""A model's chat template: messages -> prompt text, in Jinja's sandbox. Knows nothing of token ids.

A template comes with the model and is not trusted; a failure inside it is an error of the request, in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import RequestError

# Errors of a template's expressions on messages it was not written for.
EVALUATION_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """`sources` by name: "default", and possibly "tool_use" for requests with tools. Empty: no template."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        environment = _environment()
        return {name: environment.from_string(source) for name, source in self.sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        given = {**self.special_tokens, **variables, "messages": messages, "tools": tools}
        try:
            return self._choose(bool(tools)).render(given, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise RequestError(f"The model's chat template refused the request: {error.message or error}") from error
        except EVALUATION_ERRORS as error:
            raise RequestError(f"The model's chat template failed on these messages: {error}") from error

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if not self.sources:
            raise RequestError("The model has no chat template: send a plain prompt instead of messages.")
        if with_tools and "tool_use" in self.sources:
            return self._compiled["tool_use"]
        name = "default" if "default" in self.sources else next(iter(self.sources))
        return self._compiled[name]


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
