"""Responses of `/v1/messages`: blocks of thinking, text and tool use, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.server.errors import ApiError, anthropic_error
from slipstream.server.protocols.anthropic.messages import MessagesRequest
from slipstream.server.protocols.api_protocol import ApiWriter, error_field, named, new_id
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.timings import Finish
from slipstream.server.text.parts import Call, Part, Text, Thinking, continues

UNSIGNED = "unsigned"  # a signature is required by the protocol; this server checks none
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "error": "error"}


class MessagesWriter(ApiWriter):
    keep_alive = named({"type": "ping"})

    def __init__(self, request: MessagesRequest, model: str) -> None:
        self._message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._index = -1  # of the open block
        self._kind: type[Part] | None = None

    def opening(self, num_prompt: int, num_cached: int) -> str:
        usage = _usage(num_prompt, num_cached, 0)
        stop = {"stop_reason": None, "stop_sequence": None}
        return named({"type": "message_start", "message": {**self._message, "content": [], **stop, "usage": usage}})

    def delta(self, delta: ChoiceDelta) -> str:
        return "".join(self._part(part) for part in delta.parts)

    def _part(self, part: Part) -> str:
        opened = "" if continues(part, self._kind) else self._close() + self._open(part)
        delta = _delta(part)
        return opened + (self._event("delta", delta=delta) if delta is not None else "")

    def _open(self, part: Part) -> str:
        self._index, self._kind = self._index + 1, type(part)
        return self._event("start", content_block=_block(part, empty=True))

    def _close(self) -> str:
        if self._kind is None:
            return ""
        signed = {"type": "signature_delta", "signature": UNSIGNED}
        signature = self._event("delta", delta=signed) if self._kind is Thinking else ""
        return signature + self._event("stop")

    def _event(self, what: str, **fields: Any) -> str:
        return named({"type": f"content_block_{what}", "index": self._index, **fields})

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        empty = "" if self._kind is not None else self._open(Text([]))
        last = {"type": "message_delta", "delta": _stop(finish), "usage": _usage_of(finish)} | self.report(finish)
        return empty + self._close() + named(last) + named({"type": "message_stop"})

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> dict[str, Any]:
        content = [_block(part) for part in choices[0].parts] or [_block(Text([]))]
        message = {**self._message, "content": content, **_stop(total), "usage": _usage_of(total)}
        return message | self.report(total)

    def failure(self, error: ApiError) -> str:
        return named(anthropic_error(error))


def _block(part: Part, empty: bool = False) -> dict[str, Any]:
    """``empty``: without content, as in its start event."""
    match part:
        case Text():
            return {"type": "text", "text": "" if empty else part.text}
        case Thinking():
            return {"type": "thinking", "thinking": "" if empty else part.text, "signature": "" if empty else UNSIGNED}
        case Call():
            given = {} if empty else part.arguments_object()
            return {"type": "tool_use", "id": f"toolu_{part.id}", "name": part.name, "input": given}


def _delta(part: Part) -> dict[str, Any] | None:
    match part:
        case Text():
            return {"type": "text_delta", "text": part.text}
        case Thinking():
            return {"type": "thinking_delta", "thinking": part.text}
        case Call(_, arguments):
            return {"type": "input_json_delta", "partial_json": arguments} if arguments else None


def _stop(finish: Finish) -> dict[str, Any]:
    if finish.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {"stop_reason": STOP_REASONS[finish.reason], "stop_sequence": None, **error_field(finish)}


def _usage_of(finish: Finish) -> dict[str, int]:
    return _usage(finish.num_prompt, finish.num_cached, finish.num_output)


def _usage(num_prompt: int, num_cached: int, num_output: int) -> dict[str, int]:
    """Tokens from the cache are not among the input's. Writing the cache costs nothing here, so nothing is counted."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output,
    }
