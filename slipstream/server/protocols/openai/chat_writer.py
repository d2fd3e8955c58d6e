"""Responses of `/v1/chat/completions`, with any number of choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.server.protocols.api_protocol import (
    DONE,
    ApiWriter,
    data,
    error_field,
    new_id,
    now,
    openai_usage,
    origins,
)
from slipstream.server.protocols.openai.chat import ChatRequest
from slipstream.server.protocols.openai.live_fields import LiveFields
from slipstream.server.protocols.openai.logprobs import chat_logprobs
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.timings import Finish
from slipstream.server.text.json_text import compact
from slipstream.server.text.parts import Call, Part, Text, Thinking


class ChatWriter(ApiWriter):
    def __init__(self, request: ChatRequest, model: str) -> None:
        self._origins, self._logprobs = bool(request.return_origins), bool(request.logprobs)
        self._usage = request.wants_usage
        self._live = LiveFields(request)
        self._head = {"id": new_id("chatcmpl-"), "created": now(), "model": model}
        self._num_calls = [0] * (request.n or 1)
        # Deltas with only text are by far the most frequent: the fixed text around them is encoded once.
        self._fixed = [self._around_content(index) for index in range(request.n or 1)]

    def _around_content(self, index: int) -> tuple[str, str]:
        before, after = compact(self._chunk(index, {"content": ""})).split('"content":""')
        return f'data: {before}"content":', f"{after}\n\n"

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def opening(self, num_prompt: int, num_cached: int) -> str:
        first = {"role": "assistant", "content": ""}
        prompt = {"prompt_token_ids": list(self.prompts[0])} if self._live.token_ids else {}
        return "".join(data(self._chunk(index, first) | prompt) for index in range(len(self._fixed)))

    def delta(self, delta: ChoiceDelta) -> str:
        if not self._live:
            return "".join(self._part(delta.index, part) for part in delta.parts)
        chunks = [self._part_chunk(delta.index, part) for part in delta.parts] or [self._chunk(delta.index, {})]
        for chunk in chunks:  # all tokens with the last one: a token may belong to several parts
            chunk["choices"][0] |= self._live.of_choice(delta.tokens if chunk is chunks[-1] else ())
        chunks[-1] |= self._live.of_chunk(delta)
        return "".join(map(data, chunks))

    def _part(self, index: int, part: Part) -> str:
        if isinstance(part, Text) and not (self._origins or self._logprobs):
            before, after = self._fixed[index]
            return f"{before}{compact(part.text)}{after}"
        return data(self._part_chunk(index, part))

    def _part_chunk(self, index: int, part: Part) -> dict[str, Any]:
        match part:
            case Text(pieces):
                logprobs = chat_logprobs(pieces) if self._logprobs else None
                return self._chunk(index, {"content": part.text}, logprobs=logprobs, **self._origins_field(part))
            case Thinking():
                return self._chunk(index, {"reasoning_content": part.text}, **self._origins_field(part))
            case Call():
                return self._chunk(index, {"tool_calls": [self._call(index, part)]})

    def _origins_field(self, part: Text | Thinking) -> dict[str, Any]:
        return {"origins": origins(part.pieces)} if self._origins else {}

    def _call(self, index: int, part: Call) -> dict[str, Any]:
        if part.name is None:
            return {"index": self._num_calls[index] - 1, "function": {"arguments": part.arguments}}
        self._num_calls[index] += 1
        return {"index": self._num_calls[index] - 1, **_call(part)}

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        last = self._chunk(index, {}, finish.reason, **error_field(finish))
        if total is None:
            return data(last)
        usage = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": openai_usage(total)}
        last |= self.report(total)
        if not self._usage:
            return data(last | total.metrics()) + DONE
        return data(last) + data(usage | total.metrics()) + DONE

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            **({"prompt_token_ids": list(self.prompts[0])} if self._live.token_ids else {}),
            "usage": openai_usage(total),
            **self.report(total),
            **total.metrics(),
        }

    def _choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        calls = [_call(call) for call in choice.calls]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thinking:
            message["reasoning_content"] = choice.thinking
        if calls:
            message |= {"content": choice.text or None, "tool_calls": calls}
        pieces = choice.pieces
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(pieces) if self._logprobs else None,
            "finish_reason": choice.finish.reason,
            **({"origins": origins(pieces)} if self._origins else {}),
            **({"token_ids": list(choice.tokens)} if self._live.token_ids else {}),
            **error_field(choice.finish),
        }


def _call(part: Call) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": f"call_{part.id}", "type": "function", "function": function}
