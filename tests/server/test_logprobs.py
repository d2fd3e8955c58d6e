"""Log-probabilities over the wire: one entry a token, the model's own numbers, the same streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import END, TOKENIZER, FakeServer, asked, said
from fakes import continuation, opinions
from test_protocols import CHAT, HELLO, stream

from slipstream.engine.contract import TokenLogprobs

SEED, MAX_TOKENS, TOP = 5, 12, 3
PROMPT = asked("hello")
TOKENS = TOKENIZER.encode(PROMPT)
OUTPUT = continuation(TOKENS, SEED, 97, MAX_TOKENS, (END,))


def raw(token: int) -> bytes:
    return TOKENIZER.token_bytes(token, skip_special=False)


def expected_logprobs(top: int, output: tuple[int, ...] = OUTPUT) -> list[TokenLogprobs]:
    """The fake model's log-probabilities of each token after the prompt's first."""
    return opinions((*TOKENS, *output), top)


def entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": raw(token).decode(), "logprob": logprob, "bytes": list(raw(token))}


def entries(top: int, output: tuple[int, ...] = OUTPUT) -> list[dict[str, Any]]:
    own = expected_logprobs(top, output)[len(TOKENS) - 1 :]
    return [
        {**entry(token, each.logprob), "top_logprobs": [entry(t, x) for t, x in each.top]}
        for token, each in zip(output, own, strict=True)
    ]


@pytest.mark.parametrize("top", [None, 0, TOP])
def test_chat(fake: FakeServer, top: int | None) -> None:
    body = {"messages": HELLO, "seed": SEED, "max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": top}
    [choice] = fake.post(CHAT, **body).json()["choices"]
    assert choice["logprobs"] == {"content": entries(top or 0), "refusal": None}
    chunks = [each["choices"][0] for each in stream(fake, CHAT, **body) if each["choices"]]
    assert [e for each in chunks for e in (each["logprobs"] or {"content": []})["content"]] == entries(top or 0)


def test_the_same_without_speculation(fake: FakeServer) -> None:
    body = {"messages": HELLO, "seed": SEED, "max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": TOP}
    off = fake.post(CHAT, **body, speculative={"enabled": False}).json()
    assert off["choices"][0]["logprobs"]["content"] == entries(TOP)


def test_an_end_token_has_one_too_and_a_stop_string_has_none(fake: FakeServer) -> None:
    seed = next(seed for seed in range(1000) if len(said(PROMPT, seed, 60)) < 20)
    output = continuation(TOKENS, seed, 97, 60, (END,))
    body = {"messages": HELLO, "seed": seed, "max_tokens": 60, "logprobs": True}
    [choice] = fake.post(CHAT, **body).json()["choices"]
    assert choice["logprobs"]["content"] == entries(0, output)
    assert choice["logprobs"]["content"][-1]["token"] == "<|end|>"
    text = said(PROMPT, SEED, MAX_TOKENS)
    [choice] = fake.post(CHAT, **(body | {"seed": SEED}), stop=text[4:7]).json()["choices"]
    assert choice["logprobs"]["content"] == entries(0)[: text.index(text[4:7])]


def legacy(first: int, top: int) -> dict[str, Any]:
    """From that token of prompt and output on."""
    tokens = [*TOKENS, *OUTPUT]
    opinion = [None, *expected_logprobs(top)]
    tops = [
        each and {raw(t).decode(): x for t, x in each.top} | {raw(token).decode(): each.logprob}
        for token, each in zip(tokens, opinion, strict=True)
    ]
    return {
        "tokens": [raw(token).decode() for token in tokens[first:]],
        "token_logprobs": [each and each.logprob for each in opinion[first:]],
        "top_logprobs": tops[first:],
        "text_offset": list(range(len(tokens) - first)),
    }


@pytest.mark.parametrize("prompt", [PROMPT, TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize("echo", [False, True])
def test_completions(fake: FakeServer, echo: bool, prompt: Any) -> None:
    body = {"prompt": prompt, "seed": SEED, "max_tokens": MAX_TOKENS, "logprobs": 2, "echo": echo}
    expected = legacy(0 if echo else len(TOKENS), 2)
    [choice] = fake.post("/v1/completions", **body).json()["choices"]
    assert choice["text"] == (PROMPT if echo else "") + said(PROMPT, SEED, MAX_TOKENS)
    assert choice["logprobs"] == expected
    found = [each["choices"][0] for each in stream(fake, "/v1/completions", **body)]
    assert "".join(each["text"] for each in found) == choice["text"]
    for key, values in expected.items():
        assert [value for each in found if each["logprobs"] for value in each["logprobs"][key]] == values


def test_echo_alone(fake: FakeServer) -> None:
    body = {"prompt": PROMPT, "seed": SEED, "max_tokens": MAX_TOKENS, "echo": True, "n": 2}
    response = fake.post("/v1/completions", **body).json()
    assert [choice["text"] for choice in response["choices"]] == [
        PROMPT + said(PROMPT, SEED + i, MAX_TOKENS) for i in range(2)
    ]
    assert response["choices"][0]["logprobs"] is None
    stopped = fake.post("/v1/completions", **body, stop=["h", "u:"]).json()["choices"][0]["text"]
    assert stopped.startswith(PROMPT), "a stop string is looked for in what was generated"


def test_responses(fake: FakeServer) -> None:
    asked_for = {"include": ["message.output_text.logprobs"], "top_logprobs": TOP}
    body = {"input": "hello", "seed": SEED, "max_output_tokens": MAX_TOKENS, **asked_for}
    [item] = fake.post("/v1/responses", **body).json()["output"]
    assert item["content"][0]["logprobs"] == entries(TOP)
    found = stream(fake, "/v1/responses", **body)
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == entries(TOP)
