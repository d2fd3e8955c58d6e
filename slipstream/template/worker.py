"""The process that renders chat templates. First line: the template. Every later one: the variables of a prompt."""

from __future__ import annotations

from typing import Any

from slipstream.template.render import MEMORY, Renderer
from slipstream.workers.child import Answer, serve


def start(described: dict[str, Any]) -> Answer:
    return Renderer(described["sources"], described["special_tokens"])


if __name__ == "__main__":
    serve(start, memory=MEMORY)
