"""The JSON format of a tool call, as ChatML models write it: `{"name": ..., "arguments": {...}}`.

If the name comes first, the arguments are streamed unchanged. Otherwise the call is parsed when it is complete.
"""

from __future__ import annotations

import re
from typing import Any

from slipstream.server.text.json_text import compact, strict_json
from slipstream.server.text.markup.calls import END, ToolCallParser
from slipstream.server.text.parts import Call
from slipstream.server.text.pieces import overlap

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class HermesParser(ToolCallParser):
    def __init__(self) -> None:
        self._step = self._head
        self._text = ""  # not parsed yet
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> list[Call]:
        self._text += text
        return self._step()

    def _head(self) -> list[Call]:
        head, end = HEAD.match(self._text), self._text.find(END)
        if head is not None and (end < 0 or end + len(END) > head.end()) and (name := _loads(head[1])):
            self._text, self._step = self._text[head.end() :], self._arguments
            return [Call(name), *self._arguments()]
        if end >= 0:
            return self._whole(end)
        self.failed = not "{".startswith(self._text.lstrip()[:1])
        return []

    def _whole(self, end: int) -> list[Call]:
        call = _loads(self._text[:end])
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            self.failed = True
            return []
        self.rest = self._text[end + len(END) :]
        arguments = call.get("arguments", {})
        return [Call(call["name"], arguments if isinstance(arguments, str) else compact(arguments))]

    def _arguments(self) -> list[Call]:
        """Emits the text up to the end of the arguments' JSON object."""
        length, complete = self._scan_object()
        arguments, self._text = self._text[:length], self._text[length:]
        if complete:
            self._step = self._tail
            self._tail()
        return [Call(None, arguments)] if arguments else []

    def _scan_object(self) -> tuple[int, bool]:
        """Advances the nesting state over the text. Returns how many characters belong to the object, and whether it
        ends there. A `<` outside of strings is not JSON: it ends the object too.
        """
        for i, char in enumerate(self._text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = not self._escaped and char == "\\"
                continue
            if char == "<":
                return i, True
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if char in "}]" and self._depth == 0:
                return i + 1, True
        return len(self._text), False

    def _tail(self) -> list[Call]:
        end = self._text.find(END)
        if end >= 0:
            self.rest = self._text[end + len(END) :]
        else:
            self._text = self._text[len(self._text) - overlap(self._text, END) :]
        return []


def sampled_arguments(text: str) -> str | None:
    """The arguments in the text of a call, if a template that prints them verbatim would write exactly this text."""
    name = HEAD.match(text)
    begin, arguments = (f'\n{{"name": {name[1]}, "arguments": ', text[name.end() :]) if name else ("", "")
    exact = name is not None and name[0] == begin and arguments.endswith("}\n")
    return arguments.removesuffix("}\n") if exact else None


def _loads(text: str) -> Any:
    """The parsed JSON; None if the text is not JSON."""
    try:
        return strict_json(text)
    except ValueError:
        return None
