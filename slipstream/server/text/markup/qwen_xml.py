"""The XML format of a tool call, as Qwen3.5 and Qwen3-Coder write it:

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

The output is JSON. Values with a string schema are streamed; other values are emitted when complete: as JSON if their
text is valid JSON, otherwise as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.server.text.json_text import strict_json
from slipstream.server.text.markup.calls import END, ToolCallParser
from slipstream.server.text.parts import Call
from slipstream.server.text.pieces import overlap

FUNCTION = "<function="
PARAMETER = "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
FUNCTION_HEAD = re.compile(r"\s*<function=([^<>\n]+)>")
PARAMETER_HEAD = re.compile(r"<parameter=([^<>\n]+)>")
VALUE = re.compile(r"<parameter=([^<>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
HALF_A_HEAD = re.compile(r"<(?:function|parameter)=[^<>\n]*")
PYTHON = {"True": True, "False": False, "None": None}  # as templates render earlier calls, so models write them too

Properties = Mapping[str, Any]


class QwenXmlParser(ToolCallParser):
    """``tools``: by tool name, the properties of its schema."""

    def __init__(self, tools: Mapping[str, Properties]) -> None:
        self._tools = tools
        self._properties: Properties = {}
        self._text = ""  # not parsed yet
        self._step: Callable[[list[Call]], bool] = self._function
        self._num_values = 0
        self._begun = False  # the value's leading newline was removed

    def push(self, text: str) -> list[Call]:
        self._text += text
        calls: list[Call] = []
        while self._step(calls):
            pass
        return calls

    def _function(self, calls: list[Call]) -> bool:
        if found := FUNCTION_HEAD.match(self._text):
            self._properties = self._tools.get(found[1], {})
            self._advance(found.end(), self._between)
            calls.append(Call(found[1]))
            return True
        text = self._text.lstrip()
        self.failed = not (FUNCTION.startswith(text) or HALF_A_HEAD.fullmatch(text))
        return False

    def _between(self, calls: list[Call]) -> bool:
        """Before a parameter or the end of the call. Other text is skipped."""
        self._text = self._text[self._text.find("<") :] if "<" in self._text else ""
        if found := PARAMETER_HEAD.match(self._text):
            self._advance(found.end(), self._string if is_string(self._properties.get(found[1])) else self._other)
            comma, self._num_values, self._begun = ", " if self._num_values else "{", self._num_values + 1, False
            calls.append(Call(None, f"{comma}{json.dumps(found[1], ensure_ascii=False)}: "))
            return True
        if self._text.startswith((END_FUNCTION, END)):
            calls.append(Call(None, "}" if self._num_values else "{}"))
            self._step = self._tail
            return True
        if self._may_continue():
            return False
        self._text = self._text[1:]
        return True

    def _may_continue(self) -> bool:
        """Whether the text may become a tag that `_between` recognises."""
        known = (PARAMETER, END_FUNCTION, END)
        return any(each.startswith(self._text) for each in known) or bool(HALF_A_HEAD.fullmatch(self._text))

    def _string(self, calls: list[Call]) -> bool:
        if not self._begun:
            if not self._text:
                return False
            self._begun = True
            self._text = self._text.removeprefix("\n")
            calls.append(Call(None, '"'))
        end = self._text.find(END_PARAMETER)
        certain = self._text[:end] if end >= 0 else self._text[: len(self._text) - overlap(self._text, END_PARAMETER)]
        certain = certain.removesuffix("\n")
        if text := json.dumps(certain, ensure_ascii=False)[1:-1] + ('"' if end >= 0 else ""):
            calls.append(Call(None, text))
        if end < 0:
            self._text = self._text[len(certain) :]
            return False
        self._advance(end + len(END_PARAMETER), self._between)
        return True

    def _other(self, calls: list[Call]) -> bool:
        end = self._text.find(END_PARAMETER)
        if end < 0:
            return False
        calls.append(Call(None, _as_json(self._text[:end].removeprefix("\n").removesuffix("\n"))))
        self._advance(end + len(END_PARAMETER), self._between)
        return True

    def _tail(self, calls: list[Call]) -> bool:
        end = self._text.find(END)
        if end >= 0:
            self.rest = self._text[end + len(END) :]
        else:
            self._text = self._text[len(self._text) - overlap(self._text, END) :]
        return False

    def _advance(self, read: int, step: Callable[[list[Call]], bool]) -> None:
        self._text, self._step = self._text[read:], step


def is_string(schema: Any) -> bool:
    """Whether all values of this schema are strings."""
    if not isinstance(schema, dict):
        return False
    options = schema.get("enum")
    strings = isinstance(options, list) and all(isinstance(option, str) for option in options)
    return bool(strings) if "enum" in schema else schema.get("type") == "string"


def sampled_values(text: str) -> dict[str, str] | None:
    """The texts of all values in the text of a call, if a template that prints them verbatim would write exactly this
    text."""
    name = FUNCTION_HEAD.match(text)
    values = {found[1]: found[2] for found in VALUE.finditer(text)}
    if name is None or text != f"\n{FUNCTION}{name[1]}>\n{_written(values)}{END_FUNCTION}\n":
        return None
    return values


def _written(values: Mapping[str, str]) -> str:
    return "".join(f"{PARAMETER}{key}>\n{value}\n{END_PARAMETER}\n" for key, value in values.items())


def _as_json(text: str) -> str:
    if text in PYTHON:
        return json.dumps(PYTHON[text])
    try:
        return json.dumps(strict_json(text), ensure_ascii=False)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
