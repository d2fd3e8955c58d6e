"""Log-probabilities in the shapes of OpenAI's protocols."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.server.text.pieces import Piece


def entries(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """One entry per token, for chat and responses."""
    return [
        {**_entry(each.raw, each.logprob), "top_logprobs": [_entry(raw, value) for raw, value in each.top]}
        for piece in pieces
        for each in piece.scores
    ]


def chat_logprobs(pieces: Iterable[Piece]) -> dict[str, Any]:
    return {"content": entries(pieces), "refusal": None}


def _entry(raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def legacy_logprobs(pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
    """For completions: parallel lists. ``offset``: where in the text the pieces begin."""
    lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        for each in piece.scores:
            own = {} if each.logprob is None else {_name(each.raw): each.logprob}
            lists["tokens"].append(_name(each.raw))
            lists["token_logprobs"].append(each.logprob)
            lists["top_logprobs"].append({_name(raw): value for raw, value in each.top} | own or None)
            lists["text_offset"].append(offset)
        offset += len(piece.text)
    return lists


def _name(raw: bytes) -> str:
    """A token that is half a character has no text: its bytes are escaped, so that names stay distinct."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
