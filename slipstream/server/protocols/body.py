"""Parses a body into a request model, within limits. Errors name the field; what is unknown is collected, not refused.

What is expensive to parse is refused first: a few megabytes of JSON can hold millions of values. `Items` stops at the
first wrong entry of a list, so a refusal costs no more than an acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from slipstream.server.errors import ApiError
from slipstream.server.protocols.expected import KINDS, Place, expected, place
from slipstream.server.text.json_text import compact

NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
MAX_NAME = 100  # characters of a field's name in a message
MAX_FAULTS = 256  # that are looked at to choose one
MAX_STRINGS = 1 << 16  # of a body, keys included
MIN_VALUES = 1 << 16
MAX_UNKNOWN = 256  # unknown fields of a body
MAX_LIST = 1 << 14  # entries of any list, except lists of token ids
T = TypeVar("T")


def _without_limit(schema: dict[str, Any]) -> None:
    """A limit that no honest client meets: generators of test data would go there."""
    schema.pop("maxItems", None)


Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_LIST, json_schema_extra=_without_limit)]
SomeItems = Annotated[
    list[T], Field(fail_fast=True, min_length=1, max_length=MAX_LIST, json_schema_extra=_without_limit)
]


class Unknown(NamedTuple):
    field: str
    sentence: str


class Body(BaseModel):
    """A JSON object of a request. Fields that are not declared: `ignored` ones may have any value, `neutral` ones only
    null or a value that asks for nothing; all others are named in the answer's warnings."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def unknown_values(self) -> Iterable[Unknown]:
        """What this server does not know among the values of declared fields."""
        return ()


R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class JsonLimits:
    depth: int = 64
    values: int = MIN_VALUES  # entries of all lists and objects together

    @classmethod
    def for_context(cls, depth: int, context: int) -> JsonLimits:
        """With room for a prompt of token ids."""
        return cls(depth, max(MIN_VALUES, 2 * context))


def parse(request: type[R], body: bytes, limits: JsonLimits, strict: bool = False) -> tuple[R, list[Unknown]]:
    """The request and what is unknown in it. ``strict``: that is an error."""
    check_limits(body, limits)
    try:
        parsed = request.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(request, error.errors(include_url=False, include_input=False)) from None
    unknown = list(islice(_unknown(parsed, ""), MAX_UNKNOWN + 1))
    if len(unknown) > MAX_UNKNOWN:
        raise ApiError(
            400, f"more than {MAX_UNKNOWN} fields are not ones this server knows, such as {unknown[0].field}"
        )
    if strict and unknown:
        raise ApiError(400, unknown[0].sentence, param=unknown[0].field, code="unknown_field")
    return parsed, unknown


def check_limits(body: bytes, limits: JsonLimits) -> None:
    """Before parsing, since a parser may recurse, and builds every value. Linear in the body."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise ApiError(400, f"the JSON has more than {MAX_STRINGS} strings")
    outside = b"".join(plain.split(b'"')[::2])
    opened = outside.count(b"[") + outside.count(b"{")
    if outside.count(b",") + opened > limits.values:
        raise ApiError(400, f"the JSON has more than {limits.values} values")
    depth = 0
    for bracket in outside.translate(None, NO_BRACKET):
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.depth:
            raise ApiError(400, f"the JSON is nested deeper than {limits.depth} levels")
        if depth < 0:
            return  # not JSON: the parser says where


def _unknown(model: Body | BaseModel, where: str) -> Iterator[Unknown]:
    """Fields that are neither declared nor in a table, and values. Neutral fields with other values are errors."""
    for name, value in (model.model_extra or {}).items():
        path = f"{where}{name}"[:MAX_NAME]
        if name in getattr(model, "ignored", ()):
            continue
        allowed = getattr(model, "neutral", {}).get(name)
        if allowed is None:
            yield Unknown(path, f"{path} is not a field this server knows")
        elif value is not None and value not in allowed:
            only = " or ".join(map(compact, allowed))
            why = (
                f"may only be {only} here, other values are not supported" if only else "is not supported: leave it out"
            )
            raise ApiError(400, f"{path} {why}", param=path)
    if isinstance(model, Body):
        yield from model.unknown_values()
    for name in model.model_fields_set:
        value = getattr(model, name, None)
        if isinstance(value, BaseModel):
            yield from _unknown(value, f"{where}{name}.")
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, BaseModel):
                    yield from _unknown(each, f"{where}{name}.{i}.")


def _refusal(request: type[BaseModel], faults: list[ErrorDetails]) -> ApiError:
    """One sentence about the most relevant fault."""
    placed = [(place(request, fault["loc"]), fault) for fault in faults[:MAX_FAULTS]]
    here, fault = max(placed, key=lambda each: _relevance(each[0], each[1]["type"]))
    name = ".".join(map(str, here.names))[:MAX_NAME]
    if fault["type"] not in KINDS:
        return ApiError(400, _sentence(name, fault), param=name or None)
    types = [other["type"] for there, other in placed if there.names == here.names]
    return ApiError(400, expected(name or "the body", here.allowed, types), param=name or None)


def _relevance(here: Place, fault_type: str) -> tuple[bool, int, int, int]:
    """Unions report every branch: the one that came furthest counts. A list that is too long has entries that are all
    right; otherwise the deepest fault counts, a wrong field before a missing one, since the fields of other branches
    are all missing, and then the last entry of a list."""
    rank = 0 if fault_type == "missing" else 1 if fault_type in KINDS else 2
    index = next((name for name in reversed(here.names) if isinstance(name, int)), 0)
    return fault_type == "too_long", len(here.names), rank, index


def _sentence(name: str, fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    match fault["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {context.get('error', 'malformed')}"
        case "missing":
            return f"{name} is required"
        case "union_tag_invalid":
            return _kind(name, context.get("tag"), context.get("expected_tags"))
        case "union_tag_not_found":
            return f"{name}.type is required"
        case "too_long":
            return f"{name} should have at most {context.get('max_length')} entries"
        case "string_pattern_mismatch":
            return f"{name} should match the pattern {context.get('pattern')}"
    return f"{name or 'the body'}: {fault['msg'][:1].lower()}{fault['msg'][1:]}"


def _kind(name: str, given: Any, expected: Any) -> str:
    """A part of a message, a tool or an item whose type is not one that is read here."""
    given = re.sub(r"[^\w-]+", " ", str(given))[:MAX_NAME]
    for word, medium in (("image", "images"), ("audio", "audio"), ("file", "files"), ("document", "documents")):
        if word in given:
            return f"{name} has the type '{given}': {medium} cannot be read here, only text"
    return f"{name} has the type '{given}', which is not supported; supported: {expected}"
