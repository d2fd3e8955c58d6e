"""Twenty schemas as clients send them: nested, with enums, numbers, arrays, references, unicode.

All of them bound their texts and digits: a model that loses its thread in endless ones meets its length limit.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(**properties: Schema) -> Schema:
    """All of them required, nothing else."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def text(most: int = 24) -> Schema:
    return {"type": "string", "maxLength": most}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    """In quarters: JSON's numbers may have any number of digits."""
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.25}


def items(of: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


FLAG: Schema = {"type": "boolean"}
PLACE = record(city=text(), country={"enum": ["DE", "FR", "JP", "BR"]})

SCHEMAS: dict[str, Schema] = {
    "person": record(name=text(), age=integer(0, 120)),
    "enums": record(colour={"enum": ["red", "green", "blue"]}, size={"enum": ["S", "M", "L", None]}),
    "numbers": record(x=number(-1, 1), y=integer(-1000, 1000), z=number(0, 1e6)),
    "array": items(integer(0, 9), 2, 6),
    "nested": record(a=record(b=record(c=record(d=text(8))))),
    "list of records": items(record(id=integer(1, 99), done=FLAG), 1, 3),
    "unicode values": record(wort={"enum": ["Straße", "über", "日本語", "🙂", "naïve café"]}, gut=FLAG),
    "unicode keys": record(größe=integer(1, 50), 名前=text(10), é=FLAG),
    "choice of shapes": {"anyOf": [record(kind={"const": "circle"}, r=number(0, 10)), record(kind={"const": "dot"})]},
    "optional": {
        "type": "object",
        "properties": {"a": text(8), "b": integer(0, 9), "c": FLAG},
        "required": ["b"],
        "additionalProperties": False,
    },
    "pattern": record(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, hex={"type": "string", "pattern": "^#[0-9a-f]{6}$"}
    ),
    "formats": record(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "references": {
        "$defs": {"place": PLACE},
        **record(born={"$ref": "#/$defs/place"}, lives={"$ref": "#/$defs/place"}),
    },
    "tree": {
        "$defs": {
            "node": record(name=text(6), children=items({"$ref": "#/$defs/leaf"}, 0, 2)),
            "leaf": record(name=text(6)),
        },
        "$ref": "#/$defs/node",
    },
    "nullable": record(
        note={"type": ["string", "null"], "maxLength": 16},
        rank={"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    ),
    "fixed": record(version={"const": 3}, tags={"const": ["a", "b"]}, ok={"const": True}),
    "pairs": {"type": "array", "prefixItems": [text(8), integer(0, 99)], "items": False, "minItems": 2},
    "exclusive": record(
        p={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25}, q=integer(5, 5)
    ),
    "matrix": items(items(integer(0, 1), 2, 2), 2, 2),
    "order": record(
        customer=record(name=text(16), address=PLACE),
        lines=items(record(article=text(12), count=integer(1, 9), price=number(0, 999)), 1, 2),
        state={"enum": ["open", "paid", "geliefert ✓"]},
    ),
}
