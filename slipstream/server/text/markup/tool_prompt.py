"""Tools for a model whose chat template has no tools: described in the system message, calls and results as plain text.

Calls have the format of hermes.py, which most models have seen in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.server.text.json_text import compact
from slipstream.server.text.markup.calls import BEGIN, END
from slipstream.server.text.tools import Tool

Message = Mapping[str, Any]
CALL = f'{BEGIN}\n{{"name": "the function\'s name", "arguments": {{"its": "arguments"}}}}\n{END}'


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{_description(tools)}"}, *plain[1:]]
    return [{"role": "system", "content": _description(tools)}, *plain]


def _description(tools: Sequence[Tool]) -> str:
    lines = "\n".join(compact(tool.for_template()["function"]) for tool in tools)
    return (
        f"You can call these functions, each described by a line of JSON:\n{lines}\n\n"
        f"To call one, write nothing but this, and once more for each further call:\n{CALL}\n"
        "You then receive its result."
    )


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"{BEGIN}{_call_text(call)}{END}" for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def _call_text(call: Mapping[str, Any]) -> str:
    """As the model wrote it, where that is known."""
    return str(call["sampled"]) if "sampled" in call else f"\n{compact(call['function'])}\n"
