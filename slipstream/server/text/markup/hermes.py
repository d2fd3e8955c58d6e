"""The JSON form of a call, as ChatML models learn it: `{"name": ..., "arguments": {...}}`.

Where the name comes first, as it should, the arguments are told while they come, as they are written. Otherwise the
call is read as a whole.
"""

from __future__ import annotations

import re
from typing import Any

from slipstream.server.text.json_text import compact, strict_json
from slipstream.server.text.markup.calls import END, CallForm
from slipstream.server.text.parts import Call
from slipstream.server.text.pieces import overlap

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class HermesForm(CallForm):
    def __init__(self) -> None:
        self._step = self._head
        self._text = ""  # not read yet
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
        """As far as the object goes."""
        length = next((i + 1 for i, char in enumerate(self._text) if self._closes(char)), None)
        if length is None:
            told, self._text = self._text, ""
            return [Call(None, told)] if told else []
        broken = self._text[length - 1] == "<"
        told, self._text, self._step = self._text[: length - broken], self._text[length - broken :], self._tail
        self._tail()
        return [Call(None, told)] if told else []

    def _closes(self, char: str) -> bool:
        """Whether the object is over with this character. A `<` outside of strings is no JSON: it ends it too."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
            return False
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return char == "<" or (char in "}]" and self._depth == 0)

    def _tail(self) -> list[Call]:
        end = self._text.find(END)
        if end >= 0:
            self.rest = self._text[end + len(END) :]
        else:
            self._text = self._text[len(self._text) - overlap(self._text, END) :]
        return []


def _loads(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return strict_json(text)
    except ValueError:
        return None
