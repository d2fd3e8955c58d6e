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


def compact(value: object) -> str:
    return _COMPACT.encode(value)
