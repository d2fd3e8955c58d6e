"""Responses of llama.cpp's `/completion`: one object a choice; a stream is server-sent events without an end mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.server.protocols.api_protocol import ApiWriter, data, error_field, with_warnings
from slipstream.server.protocols.llamacpp.completion import LlamaCompletionRequest
from slipstream.server.protocols.llamacpp.settings import request_settings
from slipstream.server.protocols.openai.live_fields import LiveFields
from slipstream.server.service.choice import ChoiceDelta, FinishedChoice
from slipstream.server.service.prompts import TextPrompt
from slipstream.server.service.timings import Finish
from slipstream.server.text.parts import Text
from slipstream.server.text.pieces import Piece, Score, text_of

ANY_SLOT = -1


class LlamaCompletionWriter(ApiWriter):
    def __init__(self, request: LlamaCompletionRequest, model: str) -> None:
        self._request, self._model = request, model
        self._live = LiveFields(request)
        self._given = request.prompts()
        self._num_choices = request.n or 1
        self._new_line = [False] * (len(self._given) * self._num_choices)

    def opening(self, num_prompt: int, num_cached: int) -> str:
        return ""

    def delta(self, delta: ChoiceDelta) -> str:
        if not delta.parts:
            return ""
        pieces = [piece for part in delta.parts if isinstance(part, Text) for piece in part.pieces]
        text, progress = text_of(pieces), delta.progress
        assert progress is not None
        self._new_line[delta.index] |= "\n" in text
        return data(
            {
                "index": delta.index,
                "content": text,
                "tokens": list(delta.tokens),
                "stop": False,
                "id_slot": ANY_SLOT,
                "tokens_predicted": progress.num_output,
                "tokens_evaluated": progress.num_prompt,
                **self._live.of_chunk(delta),
                **self._probabilities(pieces),
            }
        )

    def ended(self, index: int, finish: Finish, total: Finish | None) -> str:
        return data(self._final(index, finish, "", ()))

    def whole(self, choices: Sequence[FinishedChoice], total: Finish) -> Any:
        found = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return found if len(found) > 1 else found[0]

    def _choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        self._new_line[index] = "\n" in choice.text
        tokens = choice.tokens if self._request.return_tokens else ()
        final = self._final(index, choice.finish, choice.text, tokens) | self._probabilities(choice.pieces)
        fields = self._request.response_fields
        return _selected(final, fields) if fields else final

    def _final(self, index: int, finish: Finish, text: str, tokens: Sequence[int]) -> dict[str, Any]:
        limit = self._request.num_predict
        stop_type = "limit" if finish.reason == "length" else "eos" if finish.stop is None else "word"
        return {
            "index": index,
            "content": text,
            "tokens": list(tokens),
            "id_slot": ANY_SLOT,
            "stop": True,
            "model": self._model,
            "tokens_predicted": finish.num_output,
            "tokens_evaluated": finish.num_prompt,
            "generation_settings": request_settings(self._request, self.params),
            "prompt": self._prompt_text(index),
            "has_new_line": self._new_line[index],
            "truncated": finish.reason == "length" and (limit is None or finish.num_output < limit),
            "stop_type": "none" if finish.reason == "error" else stop_type,
            "stopping_word": finish.stop or "",
            "tokens_cached": finish.num_prompt + finish.num_output - 1,
            "timings": _timings(finish),
            **with_warnings(self.warnings),
            **error_field(finish),
        }

    def _prompt_text(self, index: int) -> str:
        """As the client sent it; empty for a prompt with token ids."""
        given = self._given[index // self._num_choices]
        return given.text if isinstance(given, TextPrompt) else ""

    def _probabilities(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        if not self._request.n_probs:
            return {}
        scores = [score for piece in pieces for score in piece.scores]
        return {"completion_probabilities": [{**_entry(*_own(score)), "top_logprobs": _top(score)} for score in scores]}


def _own(score: Score) -> tuple[int, bytes, float | None]:
    return score.token, score.raw, score.logprob


def _top(score: Score) -> list[dict[str, Any]]:
    return [_entry(token, raw, logprob) for token, (raw, logprob) in zip(score.top_tokens, score.top)]


def _entry(token: int, raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"id": token, "token": raw.decode("utf-8", "ignore"), "bytes": list(raw), "logprob": logprob}


def _timings(finish: Finish) -> dict[str, Any]:
    found = finish.timings()
    return {
        "cache_n": finish.num_cached,
        "prompt_per_token_ms": _per_token(found["prompt_ms"], finish.num_read),
        "predicted_per_token_ms": _per_token(found["predicted_ms"], finish.num_output - 1),
        **found,
    }


def _per_token(milliseconds: float, num_tokens: int) -> float:
    return milliseconds / num_tokens if num_tokens > 0 else 0.0


def _selected(found: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Only these fields; `a/b` is the field b inside a. Those that do not exist are left out."""
    chosen: dict[str, Any] = {}
    for field in fields:
        value: Any = found
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[field] = value
    return chosen
