"""Where a fault is and what may stand there, in words, by the JSON schema of the request model.

A field that may be several things fails once for each of them. A sentence names those that were tried, with their
bounds, and not the validator's own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

Schema = dict[str, Any]
LARGE = (1 << 31) - 1  # a bound that is only worth a word to who exceeds it
NUMBERS = ("integer", "number")
# By the type of a fault: the types of JSON schema that it is about. A literal is one of fixed values.
KINDS: dict[str, tuple[str, ...]] = {
    "literal_error": ("literal",),
    "bool_type": ("boolean",),
    "int_type": ("integer",),
    "int_from_float": ("integer",),
    "int_parsing_size": ("integer",),
    "float_type": ("number",),
    "finite_number": ("number",),
    "greater_than": NUMBERS,
    "greater_than_equal": NUMBERS,
    "less_than": NUMBERS,
    "less_than_equal": NUMBERS,
    "string_type": ("string",),
    "string_too_short": ("string",),
    "string_too_long": ("string",),
    "list_type": ("array",),
    "too_short": ("array",),
    "dict_type": ("object",),
    "model_type": ("object",),
}
WORDS = {
    "literal": "another value",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}
LOWEST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
HIGHEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")


class Place(NamedTuple):
    names: tuple[int | str, ...]  # of fields, and indices of lists
    allowed: Sequence[Schema]  # what may stand there


def place(request: type[BaseModel], location: Iterable[int | str]) -> Place:
    """``location``: a fault's, in which pydantic names the branches of unions, too."""
    schema = _schema(request)
    definitions = schema.get("$defs", {})
    names: tuple[int | str, ...] = ()
    here = [schema]
    for part in location:
        inside = [leaf for each in here for child in _children(each, part) for leaf in _leaves(child, definitions)]
        if inside:
            names, here = (*names, part), inside
    return Place(names, here)


@cache
def _schema(request: type[BaseModel]) -> Schema:
    return request.model_json_schema()


def _children(schema: Schema, part: int | str) -> Iterator[Schema]:
    if isinstance(part, int):
        found = [schema.get("items")]
    elif part in schema.get("properties", ()):
        found = [schema["properties"][part]]
    else:
        found = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    yield from (each for each in found if isinstance(each, dict))


def _leaves(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    """The branches of a union, and what a reference stands for."""
    if "$ref" in schema:
        yield from _leaves(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    elif union := schema.get("anyOf") or schema.get("oneOf"):
        for branch in union:
            yield from _leaves(branch, definitions)
    else:
        yield schema


def expected(name: str, allowed: Iterable[Schema], faults: Sequence[str]) -> str:
    """The sentence. ``faults``: the types of all faults at the place."""
    by_kind: dict[str, list[Schema]] = {}
    for schema in allowed:
        by_kind.setdefault(_kind(schema), []).append(schema)
    tried = {kind for fault in faults for kind in KINDS.get(fault, ())}
    found = [kind for kind in by_kind if kind in tried]
    values = list(dict.fromkeys(repr(value) for schema in by_kind.get("literal", ()) for value in _values(schema)))
    if found == ["literal"]:
        return f"{name} may only be {_joined(values, ' or ')} here, other values are not supported"
    words = [
        word
        for kind in found
        for word in (values if kind == "literal" else [_words(kind, _widest(by_kind[kind]), faults)])
    ]
    words = words or [WORDS[kind] for kind in sorted(tried)]  # of a schema that says less than is checked
    return f"{name} should be {_joined(words, ', or ')}"


def _kind(schema: Schema) -> str:
    return "literal" if _values(schema) else str(schema.get("type"))


def _values(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _joined(words: Sequence[str], last: str) -> str:
    *others, end = words
    return f"{', '.join(others)}{last}{end}" if others else end


def _widest(schemas: Sequence[Schema]) -> Schema:
    """The bounds that all of them have."""
    shared = set.intersection(*map(set, schemas))
    found = {key: min(schema[key] for schema in schemas) for key in LOWEST if key in shared}
    found |= {key: max(schema[key] for schema in schemas) for key in HIGHEST if key in shared}
    return {key: int(bound) if bound == int(bound) else bound for key, bound in found.items()}


def _words(kind: str, bounds: Schema, faults: Sequence[str]) -> str:
    match kind:
        case "integer" | "number":
            return _number(WORDS[kind], bounds, faults)
        case "string":
            return f"a text{_size(bounds.get('minLength'), bounds.get('maxLength'), 'characters')}"
        case "array":
            return f"a list{_size(bounds.get('minItems'), bounds.get('maxItems'), 'entries')}"
    return WORDS[kind]


def _size(low: int | None, high: int | None, unit: str) -> str:
    if high is None:
        return " that is not empty" if low else ""
    return f" of {low} to {high} {unit}" if low else f" of at most {high} {unit}"


def _number(word: str, bounds: Schema, faults: Sequence[str]) -> str:
    low, above = bounds.get("minimum"), bounds.get("exclusiveMinimum")
    high = bounds["exclusiveMaximum"] - 1 if "exclusiveMaximum" in bounds else bounds.get("maximum")
    if low is not None and abs(low) > LARGE and not any(fault.startswith("greater") for fault in faults):
        low = None
    if high is not None and high >= LARGE and not any(fault.startswith("less") for fault in faults):
        high = None
    match low, above, high:
        case None, None, None:
            return word
        case None, None, _:
            return f"{word} of at most {high}"
        case _, None, None:
            return f"{word} of at least {low}"
        case _, None, _:
            return f"{word} from {low} to {high}"
        case _, _, None:
            return f"{word} above {above}"
    return f"{word} above {above} and at most {high}"
