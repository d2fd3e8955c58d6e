"""Required tool calls as a grammar: in the model's call format, with the schemas of the tools."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from slipstream.grammar import JsonObject, JsonSchema, Lark, Spec
from slipstream.server.errors import ApiError
from slipstream.server.text.markup.calls import BEGIN, END
from slipstream.server.text.markup.qwen_xml import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER, is_string
from slipstream.server.text.tools import Tool, ToolUse

Rules = dict[str, str]
# Schemas of tools are descriptions: keywords that cannot be enforced are ignored. White space is bounded.
OPTIONS = {"lenient": True, "coerce_one_of": True, "whitespace_pattern": r"[ \n\r\t]{1,32}"}


class CallGrammar(ABC):
    @abstractmethod
    def rules(self, name: str, tool: Tool) -> Rules:
        """The rule ``name`` for the text between the markers, and the rules that it refers to."""


class HermesGrammar(CallGrammar):
    def rules(self, name: str, tool: Tool) -> Rules:
        schema, shared = _split_definitions(tool.schema)
        call = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            **shared,
        }
        return {name: _json(call)}


class QwenXmlGrammar(CallGrammar):
    """Parameters come in the order of the schema. Strings may be any text: this format has no escapes."""

    def rules(self, name: str, tool: Tool) -> Rules:
        _, shared = _split_definitions(tool.schema)
        required = tool.schema.get("required")
        needed = required if isinstance(required, list) else []
        line = [_text(f"{FUNCTION}{tool.name}>\n")]
        rules: Rules = {}
        for i, (key, schema) in enumerate(tool.properties.items()):
            own = f"{name}_{i}"
            line.append(own if key in needed else f"{own}?")
            rules |= self._parameter(own, key, schema, shared)
        line.append(_text(END_FUNCTION))
        return {name: " ".join(line), **rules}

    def _parameter(self, name: str, key: str, schema: Any, shared: Mapping[str, Any]) -> Rules:
        head, end = _text(f"{PARAMETER}{key}>\n"), f"\n{END_PARAMETER}\n"
        value = f"{name}_value"
        if not is_string(schema):
            full = {**schema, **shared} if isinstance(schema, dict) else schema
            return {name: f"{head} {value} {_text(end)}", value: _json(full)}
        if options := schema.get("enum"):
            return {name: f"{head} {value} {_text(end)}", value: " | ".join(map(_text, options))}
        return {name: f"{head} {value}", f"{value}[suffix={_text(end)}]": "/(?s:.*)/"}


def call_grammar(format: CallGrammar, tools: ToolUse, answer: Spec | None) -> Spec:
    """``answer``: the format of an answer without a call, if no call is required."""
    callable_tools = tools.required or tools.tools
    names = [f"call_{i}" for i in range(len(callable_tools))]
    rules: Rules = {"start": "calls"}
    if not tools.required and answer is not None:
        rules = {"start": "calls | answer", "answer": _json(_schema_of(answer))}
    rules["calls"] = 'call ("\\n" call)*' if tools.parallel else "call"
    rules["call"] = " ".join((_text(f"{BEGIN}\n"), f"({' | '.join(names)})", _text(f"\n{END}")))
    for name, tool in zip(names, callable_tools):
        rules |= format.rules(name, tool)
    return Lark("\n".join(f"{name}: {body}" for name, body in rules.items()) + "\n")


def _schema_of(answer: Spec) -> Mapping[str, Any] | bool:
    match answer:
        case JsonObject():
            return {"type": "object"}
        case JsonSchema(schema):
            return schema
    raise ApiError(400, "tools together with a pattern, choice or grammar are not supported", param="tools")


def _split_definitions(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema without its definitions, and the definitions: references look for those at the top level."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {key: value for key, value in schema.items() if key not in shared}, shared


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS} if isinstance(schema, Mapping) else schema)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
