"""Responses of `/v1/responses`: items of reasoning, messages and function calls, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.server.errors import ApiError
from slipstream.server.protocols.api_protocol import ApiWriter, named, new_id, now
from slipstream.server.protocols.openai.logprobs import entries
from slipstream.server.protocols.openai.responses import ResponsesRequest
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.timings import Finish
from slipstream.server.text.parts import Call, Part, Text, Thinking, continues, joined

STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "error": "failed"}


class Item:
    """One item of the output and its events."""

    def __init__(self, part: Part) -> None:
        self.kind = type(part)
        self._parts = [part]
        prefix = "msg_" if isinstance(part, Text) else "rs_" if isinstance(part, Thinking) else "fc_"
        self.id = new_id(prefix)

    def takes(self, part: Part) -> bool:
        return continues(part, self.kind)

    def add(self, part: Part) -> None:
        self._parts.append(part)

    @property
    def part(self) -> Part:
        """The item's content so far."""
        return joined(self._parts)[0]

    def body(self, status: str, empty: bool = False) -> dict[str, Any]:
        """``empty``: without content, as in its `added` event."""
        part = self.part
        match part:
            case Text():
                content = [] if empty else [_text(part)]
                return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
            case Thinking():
                content = [] if empty else [_reasoning(part)]
                return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
            case Call(name, arguments, call_id):
                call = {"call_id": f"call_{call_id}", "name": name, "arguments": "" if empty else arguments}
                return {"id": self.id, "type": "function_call", "status": status, **call}

    def start_events(self) -> list[dict[str, Any]]:
        if self.kind is Call:
            return []
        empty = _text(Text([])) if self.kind is Text else _reasoning(Thinking([]))
        return [{"type": "response.content_part.added", "part": empty}]

    def delta_events(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case Text(pieces):
                return [{"type": "response.output_text.delta", "delta": part.text, "logprobs": entries(pieces)}]
            case Thinking():
                return [{"type": "response.reasoning_text.delta", "delta": part.text}]
            case Call(_, arguments):
                return [{"type": "response.function_call_arguments.delta", "delta": arguments}] if arguments else []

    def done_events(self) -> list[dict[str, Any]]:
        part = self.part
        match part:
            case Text(pieces):
                text_done = {"type": "response.output_text.done", "text": part.text, "logprobs": entries(pieces)}
                return [text_done, {"type": "response.content_part.done", "part": _text(part)}]
            case Thinking():
                text_done = {"type": "response.reasoning_text.done", "text": part.text}
                return [text_done, {"type": "response.content_part.done", "part": _reasoning(part)}]
            case Call(name, arguments):
                return [{"type": "response.function_call_arguments.done", "name": name, "arguments": arguments}]


class ResponsesWriter(ApiWriter):
    def __init__(self, request: ResponsesRequest, model: str) -> None:
        self._request = request
        self._id, self._created, self._model = new_id("resp_"), now(), model
        self._items: list[Item] = []  # the last one is open
        self._num_events = 0

    def opening(self, num_prompt: int, num_cached: int) -> str:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: ChoiceDelta) -> str:
        return "".join(self._part(part) for part in delta.parts)

    def _part(self, part: Part) -> str:
        if self._items and self._items[-1].takes(part):
            self._items[-1].add(part)
            return self._inside(self._items[-1].delta_events(part))
        return self._close("completed") + self._open(part)

    def _open(self, part: Part) -> str:
        item = Item(part)
        self._items.append(item)
        added = self._event(
            "response.output_item.added", output_index=self._index, item=item.body("in_progress", empty=True)
        )
        return added + self._inside([*item.start_events(), *item.delta_events(part)])

    def _close(self, status: str) -> str:
        if not self._items:
            return ""
        item = self._items[-1]
        body = item.body(status)
        return self._inside(item.done_events()) + self._event(
            "response.output_item.done", output_index=self._index, item=body
        )

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _inside(self, events: Sequence[dict[str, Any]]) -> str:
        """Events of the open item."""
        where: dict[str, Any] = {"item_id": self._items[-1].id, "output_index": self._index}
        if self._items[-1].kind is not Call:
            where["content_index"] = 0
        return "".join(self._event(**event, **where) for event in events)

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        empty = "" if self._items else self._open(Text([]))
        status = STATUS[finish.reason]
        closed = empty + self._close(_item_status(status))
        return closed + self._event(f"response.{status}", response=self._response(status, self._output(status), finish))

    def _output(self, status: str) -> list[dict[str, Any]]:
        whole, last = self._items[:-1], self._items[-1]
        return [*(item.body("completed") for item in whole), last.body(_item_status(status))]

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> dict[str, Any]:
        self._items = [Item(part) for part in choices[0].parts or [Text([])]]
        status = STATUS[total.reason]
        return self._response(status, self._output(status), total)

    def failure(self, error: ApiError) -> str:
        return self._event("error", code=error.code or "server_error", message=error.message, param=error.param)

    def _event(self, type: str, **fields: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        return named({"type": type, "sequence_number": number, **fields})

    def _response(self, status: str, output: list[dict[str, Any]], finish: Finish | None = None) -> dict[str, Any]:
        failed = {"code": "server_error", "message": finish.error} if finish and finish.error else None
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": failed,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if finish is None else _usage(finish),
            **self._repeated(),
        }
        return response if finish is None else response | self.report(finish)

    def _repeated(self) -> dict[str, Any]:
        """Fields of the request that the protocol repeats in its response."""
        given = self._request.model_dump(by_alias=True, exclude_none=True)
        return {
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "reasoning": given.get("reasoning"),
            "temperature": given.get("temperature"),
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": given.get("top_logprobs", 0),
            "top_p": given.get("top_p"),
        }


def _item_status(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def _text(part: Text) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": entries(part.pieces)}


def _reasoning(part: Thinking) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": part.text}


def _usage(finish: Finish) -> dict[str, Any]:
    return {
        "input_tokens": finish.num_prompt,
        "input_tokens_details": {"cached_tokens": finish.num_cached},
        "output_tokens": finish.num_output,
        "output_tokens_details": {"reasoning_tokens": finish.num_thinking},
        "total_tokens": finish.num_prompt + finish.num_output,
    }
