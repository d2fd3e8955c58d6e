"""Responses of Ollama's `/api/chat` and `/api/generate`: one JSON object, or a stream of them, one a line."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from slipstream.server.errors import ApiError, ollama_error
from slipstream.server.protocols.api_protocol import ApiWriter, error_field
from slipstream.server.protocols.ollama.chat import OllamaChatRequest
from slipstream.server.protocols.ollama.fields import OllamaFields
from slipstream.server.protocols.ollama.generate import OllamaGenerateRequest
from slipstream.server.protocols.openai.logprobs import entries
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.timings import Finish
from slipstream.server.text.json_text import compact
from slipstream.server.text.parts import Call, Part, Text, Thinking, joined
from slipstream.server.text.pieces import Piece

JSON_LINES = "application/x-ndjson"


class OllamaWriter(ApiWriter):
    def __init__(self, request: OllamaFields, model: str, loads: bool) -> None:
        """``loads``: the request asks only for the model to be loaded."""
        self._model, self._loads = model, loads
        self._logprobs = bool(request.logprobs)
        self._call: list[Part] = []  # the call that is being written: its arguments are sent as a complete object
        self._num_calls = 0
        self.keep_alive = self._line(self._content("", "", []))  # clients parse every line

    @abstractmethod
    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of an answer or of a part of it."""

    def _object(self, content: dict[str, Any], done: bool) -> dict[str, Any]:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": created, **content, "done": done}

    def _line(self, content: dict[str, Any]) -> str:
        return f"{compact(self._object(content, done=False))}\n"

    def _scores(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"logprobs": entries(pieces)} if self._logprobs and pieces else {}

    def without_generation(self) -> dict[str, Any] | None:
        loaded = {**self._object(self._content("", "", []), done=True), "done_reason": "load"}
        return loaded if self._loads else None

    def opening(self, num_prompt: int, num_cached: int) -> str:
        return ""

    def delta(self, delta: ChoiceDelta) -> str:
        return "".join(self._part(part) for part in delta.parts)

    def _part(self, part: Part) -> str:
        match part:
            case Call():
                *complete, last = joined([*self._call, part])
                self._call = [last]
                return "".join(self._call_line(call) for call in complete)
            case Text(pieces):
                return self._close_call() + self._line({**self._content(part.text, "", []), **self._scores(pieces)})
            case Thinking():
                return self._close_call() + self._line(self._content("", part.text, []))

    def _close_call(self) -> str:
        complete, self._call = self._call, []
        return "".join(self._call_line(call) for call in complete)

    def _call_line(self, call: Part) -> str:
        assert isinstance(call, Call)
        self._num_calls += 1
        return self._line(self._content("", "", [_call(call, self._num_calls - 1)]))

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        return f"{self._close_call()}{compact(self._ended(finish, self._content('', '', [])))}\n"

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> dict[str, Any]:
        [choice] = choices
        calls = [_call(call, index) for index, call in enumerate(choice.calls)]
        content = self._content(choice.text, choice.thinking, calls)
        return self._ended(total, {**content, **self._scores(choice.pieces)})

    def _ended(self, finish: Finish, content: dict[str, Any]) -> dict[str, Any]:
        reason = {"done_reason": "stop" if finish.reason == "tool_calls" else finish.reason, **error_field(finish)}
        return {**self._object(content, done=True), **reason, **_durations(finish), **self.report(finish)}

    def failure(self, error: ApiError) -> str:
        return f"{compact(ollama_error(error))}\n"


class OllamaChatWriter(OllamaWriter):
    def __init__(self, request: OllamaChatRequest, model: str) -> None:
        super().__init__(request, model, loads=not request.messages)

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        optional = {"thinking": thinking, "tool_calls": calls}
        return {
            "message": {
                "role": "assistant",
                "content": text,
                **{key: value for key, value in optional.items() if value},
            }
        }


class OllamaGenerateWriter(OllamaWriter):
    def __init__(self, request: OllamaGenerateRequest, model: str) -> None:
        super().__init__(request, model, loads=not request.prompt)

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _call(call: Call, index: int) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": call.arguments_object()}
    return {"id": f"call_{call.id}", "function": function}


def _durations(finish: Finish) -> dict[str, int]:
    """In nanoseconds. Never 0, since clients divide by them; the time in the queue counts as loading."""
    timings = finish.timings()
    load, reading, writing = (max(1, round(timings[name] * 1e6)) for name in ("queue_ms", "prompt_ms", "predicted_ms"))
    return {
        "total_duration": load + reading + writing,
        "load_duration": load,
        "prompt_eval_count": finish.num_prompt,
        "prompt_eval_cached_count": finish.num_cached,
        "prompt_eval_duration": reading,
        "eval_count": finish.num_output,
        "eval_duration": writing,
    }
