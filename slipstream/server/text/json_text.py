"""JSON as text: strict in, compact out."""

from __future__ import annotations

import json
from typing import Any

_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def strict_json(text: str) -> Any:
    """Parses a JSON text. ValueError if it is not JSON; NaN, infinities and unbounded nesting are not."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def same_json(left: Any, right: Any) -> bool:
    """Whether two parsed JSON values are the same, whatever their spelling: 1 is 1.0, but not true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def compact(value: object) -> str:
    return _COMPACT.encode(value)
