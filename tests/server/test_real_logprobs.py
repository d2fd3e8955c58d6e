"""Log-probabilities, several answers and echo on the default model: the same with and without speculation."""

from __future__ import annotations

from typing import Any

import pytest
from real_server import RealServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "max_tokens": 24,
    "seed": 11,
    "temperature": 0.8,
}


def choices(server: RealServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def test_speculation_changes_no_number(real: RealServer) -> None:
    body = {**ASK, "logprobs": True, "top_logprobs": 4, "n": 3}
    on = choices(real, CHAT, **body)
    off = choices(real, CHAT, **body, speculative={"enabled": False})
    assert [choice["message"]["content"] for choice in on] == [choice["message"]["content"] for choice in off]
    for one, other in zip(on, off, strict=True):
        assert one["logprobs"]["content"] == other["logprobs"]["content"]


def test_each_choice_is_a_request_of_its_own(real: RealServer) -> None:
    together = choices(real, CHAT, **ASK, n=3)
    alone = [choices(real, CHAT, **(ASK | {"seed": 11 + i}))[0] for i in range(3)]
    assert [c["message"]["content"] for c in together] == [c["message"]["content"] for c in alone]


def test_echoed_tokens_are_scored_as_if_they_were_generated(real: RealServer) -> None:
    """What was written greedily, sent back as a prompt, gets the numbers it had."""
    prompt = "The capital of France is"
    body = {"prompt": prompt, "temperature": 0, "logprobs": 2, "max_tokens": 8}
    [written] = choices(real, COMPLETIONS, **body)
    [echoed] = choices(
        real, COMPLETIONS, **(body | {"prompt": prompt + written["text"], "echo": True, "max_tokens": 1})
    )
    assert echoed["text"].startswith(prompt + written["text"])
    count = len(written["logprobs"]["tokens"])
    scored = {key: values[-1 - count : -1] for key, values in echoed["logprobs"].items()}
    assert scored["tokens"] == written["logprobs"]["tokens"]
    assert scored["token_logprobs"] == pytest.approx(written["logprobs"]["token_logprobs"], abs=1e-4)
    assert echoed["logprobs"]["token_logprobs"][0] is None
    best = [max(top.values()) for top in scored["top_logprobs"]]
    assert scored["token_logprobs"] == pytest.approx(best, abs=1e-4), "greedy takes the likeliest"
