"""Which conversation a request belongs to: requests with the same key should meet the same prefix cache.

Pure Python: knows a header and bodies, nothing of Ray. The first of these that a request has is its key: the header
`x-session-id`, `prompt_cache_key`, Anthropic's `metadata.user_id`, else how the conversation begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

SESSION_HEADER = "x-session-id"
MAX_BEGINNING = 4096  # characters of each text that count
SYSTEM_ROLES = ("system", "developer")


def session_key(header: str | None, body: bytes) -> str | None:
    """None: nothing says that it belongs to a conversation. Keys of different origin never meet."""
    if header:
        return f"session {header}"
    request = _parsed(body)
    if request is None:
        return None
    if isinstance(named := request.get("prompt_cache_key"), str) and named:
        return f"cache key {named}"
    metadata = request.get("metadata")
    if isinstance(metadata, dict) and isinstance(user := metadata.get("user_id"), str) and user:
        return f"user {user}"
    beginning = "\n".join(_beginning(request))
    return f"text {hashlib.sha256(beginning.encode('utf-8', 'replace')).hexdigest()}" if beginning else None


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):  # the server says what is wrong with it
        return None
    return found if isinstance(found, dict) else None


def _beginning(request: dict[str, Any]) -> Iterator[str]:
    """System prompt and first message, in each protocol's fields; of a plain prompt its first characters."""
    for name in ("system", "instructions"):
        yield from _texts(request.get(name))
    turns = request.get("messages") or request.get("input") or request.get("prompt")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        yield from _texts(turns)
        return
    for turn in turns:
        yield from _texts(turn.get("content"))
        if turn.get("role") not in SYSTEM_ROLES:
            return


def _texts(content: Any) -> Iterator[str]:
    """Only text counts: marks such as `cache_control` move from turn to turn."""
    if isinstance(content, str):
        yield content[:MAX_BEGINNING]
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        for part in content:
            yield from _texts(part.get("text"))
    elif isinstance(content, list):
        yield json.dumps(content[:MAX_BEGINNING])  # token ids, or several prompts
