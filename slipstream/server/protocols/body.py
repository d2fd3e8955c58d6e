"""Parses a body into a request model, within limits. Errors name the field; unknown fields are collected, not refused.

What is expensive to parse is refused first: a few megabytes of JSON can hold millions of values. `Items` stops at the
first wrong entry of a list, so a refusal costs no more than an acceptance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from slipstream.server.errors import ApiError
from slipstream.server.text.json_text import compact

NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
MAX_NAME = 100  # characters of a field's name in a message
MAX_STRINGS = 1 << 16  # of a body, keys included
MIN_VALUES = 1 << 16
MAX_UNKNOWN = 256  # unknown fields of a body
UNKNOWN = "is not a field this server knows"
MAX_LIST = 1 << 14  # entries of any list, except lists of token ids
T = TypeVar("T")


def _without_limit(schema: dict[str, Any]) -> None:
    """A limit that no honest client meets: generators of test data would go there."""
    schema.pop("maxItems", None)


Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_LIST, json_schema_extra=_without_limit)]
SomeItems = Annotated[
    list[T], Field(fail_fast=True, min_length=1, max_length=MAX_LIST, json_schema_extra=_without_limit)
]


class Body(BaseModel):
    """A JSON object of a request. Fields that are not declared: `ignored` ones may have any value, `neutral` ones only
    null or a value that asks for nothing; all others are named in the answer's warnings."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}


R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class JsonLimits:
    depth: int = 64
    values: int = MIN_VALUES  # entries of all lists and objects together

    @classmethod
    def for_context(cls, depth: int, context: int) -> JsonLimits:
        """With room for a prompt of token ids."""
        return cls(depth, max(MIN_VALUES, 2 * context))


def parse(request: type[R], body: bytes, limits: JsonLimits, strict: bool = False) -> tuple[R, list[str]]:
    """The request and the names of its unknown fields. ``strict``: unknown fields are errors."""
    check_limits(body, limits)
    try:
        parsed = request.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)) from None
    unknown = list(islice(_unknown_fields(parsed, ""), MAX_UNKNOWN + 1))
    if len(unknown) > MAX_UNKNOWN:
        raise ApiError(400, f"more than {MAX_UNKNOWN} fields are not ones this server knows, such as {unknown[0]}")
    if strict and unknown:
        raise ApiError(400, f"{unknown[0]} {UNKNOWN}", param=unknown[0], code="unknown_field")
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


def _unknown_fields(model: Body | BaseModel, where: str) -> Iterator[str]:
    """The paths of fields that are neither declared nor in a table. Neutral fields with other values are errors."""
    for name, value in (model.model_extra or {}).items():
        path = f"{where}{name}"[:MAX_NAME]
        if name in getattr(model, "ignored", ()):
            continue
        allowed = getattr(model, "neutral", {}).get(name)
        if allowed is None:
            yield path
        elif value is not None and value not in allowed:
            only = " or ".join(map(compact, allowed))
            why = (
                f"may only be {only} here, other values are not supported" if only else "is not supported: leave it out"
            )
            raise ApiError(400, f"{path} {why}", param=path)
    for name in model.model_fields_set:
        value = getattr(model, name, None)
        if isinstance(value, BaseModel):
            yield from _unknown_fields(value, f"{where}{name}.")
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, BaseModel):
                    yield from _unknown_fields(each, f"{where}{name}.{i}.")


def _refusal(faults: list[ErrorDetails]) -> ApiError:
    """One sentence about the most relevant fault: the deepest, since unions report every branch; of those, a wrong
    field rather than a missing one, since the fields of other branches are all missing."""
    fault = max(faults, key=lambda fault: (len(fault["loc"]), fault["type"] != "missing"))
    name = ".".join(str(part) for part in fault["loc"] if not _names_a_branch(part))[:MAX_NAME]
    return ApiError(400, _sentence(name, fault), param=name or None)


def _names_a_branch(part: int | str) -> bool:
    """Pydantic adds the branch of a union to the path: a type's name, or one with brackets."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def _sentence(name: str, fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    match fault["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {context.get('error', 'malformed')}"
        case "missing":
            return f"{name} is required"
        case "literal_error":
            return f"{name} may only be {context.get('expected')} here, other values are not supported"
        case "union_tag_invalid":
            return _kind(name, context.get("tag"), context.get("expected_tags"))
        case "union_tag_not_found":
            return f"{name}.type is required"
        case "none_required":
            return f"{name} is not supported: leave it out"
        case "too_long" if context.get("max_length") == 0:
            return f"{name} is not supported: leave it out or empty"
    return f"{name or 'the body'}: {fault['msg'][:1].lower()}{fault['msg'][1:]}"


def _kind(name: str, given: Any, expected: Any) -> str:
    """A part of a message, a tool or an item whose type is not one that is read here."""
    given = re.sub(r"[^\w-]+", " ", str(given))[:MAX_NAME]
    for word, medium in (("image", "images"), ("audio", "audio"), ("file", "files"), ("document", "documents")):
        if word in given:
            return f"{name} has the type '{given}': {medium} cannot be read here, only text"
    return f"{name} has the type '{given}', which is not supported; supported: {expected}"
