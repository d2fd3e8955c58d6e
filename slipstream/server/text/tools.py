"""The tools that a request offers and its rules for calling them, the same for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.server.errors import ApiError

MAX_TOOLS = 512
Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    schema: Mapping[str, Any]  # of its arguments

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.schema.get("properties")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools an answer may call, and whether it has to."""

    tools: tuple[Tool, ...] = ()  # described to the model
    required: tuple[Tool, ...] = ()  # the answer must call one of these; empty: no call is required
    parallel: bool = True  # several calls in one answer are allowed


NO_TOOLS = ToolUse()


def tool_use(tools: Sequence[Tool], choice: Mode, named: str | None, parallel: bool) -> ToolUse:
    """``named``: the one tool that must be called; it overrides ``choice``."""
    known = {tool.name: tool for tool in tools}
    if len(known) < len(tools):
        raise ApiError(400, "tools: two have the same name", param="tools")
    if named is not None:
        if named not in known:
            raise ApiError(400, f"tool_choice names {named[:64]!r}, which is not among the tools", param="tool_choice")
        return ToolUse(tuple(tools), (known[named],), parallel=False)
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
    if choice == "none":
        return NO_TOOLS
    return ToolUse(tuple(tools), tuple(tools) if choice == "required" else (), parallel)
