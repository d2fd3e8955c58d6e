"""Parses a body into a request model. Errors name the field; unknown fields are errors."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from slipstream.server.errors import ApiError

JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
MAX_NAME = 100  # characters of a field's name in an error message


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


R = TypeVar("R", bound=BaseModel)


def parse(request: type[R], body: bytes, max_depth: int) -> R:
    check_depth(body, max_depth)
    try:
        return request.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from None


def check_depth(body: bytes, limit: int) -> None:
    """Before parsing, since a parser may recurse. One pass, linear in the body."""
    depth = 0
    for bracket in JSON_STRING.sub(b"", body).translate(None, NO_BRACKET):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            raise ApiError(400, f"the JSON is nested deeper than {limit} levels")


def _refusal(faults: list[ErrorDetails]) -> ApiError:
    """One sentence about the most relevant fault: the deepest, since unions report every branch; of those, a wrong
    field rather than a missing one, since the fields of other branches are all missing."""
    fault = max(faults, key=lambda fault: (len(fault["loc"]), fault["type"] != "missing"))
    name = ".".join(str(part) for part in fault["loc"] if not _names_a_branch(part))[:MAX_NAME]
    return ApiError(400, _sentence(name, fault), param=name or None, code=_code(fault))


def _names_a_branch(part: int | str) -> bool:
    """Pydantic adds the branch of a union to the path: a type's name, or one with brackets."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def _code(fault: ErrorDetails) -> str | None:
    return "unknown_field" if fault["type"] == "extra_forbidden" else None


def _sentence(name: str, fault: ErrorDetails) -> str:
    match fault["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {fault.get('ctx', {}).get('error', 'malformed')}"
        case "extra_forbidden":
            return f"{name} is not a field this server knows"
        case "missing":
            return f"{name} is required"
        case "literal_error":
            return f"{name} may only be {fault.get('ctx', {}).get('expected')} here, other values are not supported"
        case "none_required":
            return f"{name} is not supported: leave it out"
        case "too_long" if fault.get("ctx", {}).get("max_length") == 0:
            return f"{name} is not supported: leave it out or empty"
    return f"{name or 'the body'}: {fault['msg'][:1].lower()}{fault['msg'][1:]}"
