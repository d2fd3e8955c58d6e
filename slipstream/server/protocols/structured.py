"""The fields for structured output, translated to specs that slipstream.grammar compiles."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.grammar import Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Spec
from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import Body, SomeItems
from slipstream.server.text.json_text import strict_json
from slipstream.server.text.response_format import ResponseFormat

Schema = dict[str, Any]


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
ShortName = Annotated[str, Field(max_length=128)]
Options = SomeItems[Annotated[str, Field(min_length=1)]]


class StructuredOutputs(Body):
    """Exactly one field may be given."""

    neutral = {"structural_tag": ()}  # noqa: RUF012 - never changed

    json_schema: Schema | str | None = Field(alias="json", default=None)
    json_object: bool | None = None
    regex: str | None = None
    choice: Options | None = None
    grammar: str | None = None

    def specs(self, where: str) -> dict[str, Spec | None]:
        schema = self.json_schema
        return {
            f"{where}.json": None if schema is None else schema_spec(schema, f"{where}.json"),
            f"{where}.json_object": JsonObject() if self.json_object else None,
            f"{where}.regex": None if self.regex is None else Regex(self.regex),
            f"{where}.choice": None if self.choice is None else Choice(self.choice),
            f"{where}.grammar": None if self.grammar is None else grammar_spec(self.grammar),
        }


class TextFormat(Body):
    type: Literal["text"]

    def specs(self, where: str) -> dict[str, Spec | None]:
        return {}


class JsonFormat(Body):
    type: Literal["json_object"]
    schema_: Schema | None = Field(alias="schema", default=None)  # as llama.cpp's server takes it

    def specs(self, where: str) -> dict[str, Spec | None]:
        return {where: JsonObject() if self.schema_ is None else JsonSchema(self.schema_)}


class NamedSchema(Body):
    name: ShortName | None = None
    schema_: Schema = Field(alias="schema", default_factory=dict)
    description: str | None = None
    strict: bool | None = None  # the schema is enforced either way; strict: refuse keywords that cannot be

    def specs(self, where: str) -> dict[str, Spec | None]:
        return {f"{where}.schema": JsonSchema(self.schema_, lenient=not self.strict)}


class SchemaFormat(Body):
    """Of chat completions."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def specs(self, where: str) -> dict[str, Spec | None]:
        return self.json_schema.specs(f"{where}.json_schema")


class FlatSchemaFormat(NamedSchema):
    """Of responses."""

    type: Literal["json_schema"]


Format = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
FlatFormat = Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")]


def schema_spec(given: Schema | str, where: str) -> Spec:
    """A schema, or the JSON text of one."""
    try:
        schema = strict_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ApiError(400, f"{where} is not valid JSON: {error}", param=where) from None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{where} must be a JSON schema, an object", param=where)
    return JsonSchema(schema)


def grammar_spec(text: str) -> Spec:
    """GBNF writes its rules with `::=`, Lark does not."""
    return Gbnf(text) if "::=" in text else Lark(text)


def single_format(given: dict[str, Spec | None]) -> ResponseFormat | None:
    """The one format among these fields, if any; several are refused."""
    found = [(name, spec) for name, spec in given.items() if spec is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(400, f"{names} each set a response format: give only one of them", param=found[1][0])
    return ResponseFormat(found[0][1], found[0][0]) if found else None
