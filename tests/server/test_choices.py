"""Several answers to one prompt: each is what a request of its own would get, streamed or whole; usage counts all."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import ENGINE, FakeServer, asked, said
from fakes import FakeRunner
from test_protocols import CHAT, HELLO, stream

PATHS: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, "/v1/completions": {"prompt": asked("hello")}}
SEED, COUNT, MAX_TOKENS = 5, 3, 40


def text_of(choice: dict[str, Any]) -> str:
    found = choice.get("delta") or choice.get("message") or choice
    return str(found.get("content", found.get("text", "")))


@pytest.mark.parametrize("path", PATHS)
def test_each_choice_is_the_answer_to_its_own_seed(fake: FakeServer, path: str) -> None:
    body = {**PATHS[path], "n": COUNT, "seed": SEED, "max_tokens": MAX_TOKENS}
    expected = [said(asked("hello"), SEED + i, MAX_TOKENS) for i in range(COUNT)]
    response = fake.post(path, **body).json()
    assert [choice["index"] for choice in response["choices"]] == list(range(COUNT))
    assert [text_of(choice) for choice in response["choices"]] == expected
    singles = [fake.post(path, **(body | {"n": 1, "seed": SEED + i})).json() for i in range(COUNT)]
    for key in ("completion_tokens", "prompt_tokens"):
        each = [single["usage"][key] for single in singles]
        assert response["usage"][key] == (sum(each) if key == "completion_tokens" else each[0])
    assert response["timings"]["predicted_n"] == response["usage"]["completion_tokens"]
    accepted = [sum(column) for column in zip(*(single["timings"]["drafted_per_position"] for single in singles))]
    assert len(response["timings"]["drafted_per_position"]) == len(accepted)


@pytest.mark.parametrize("path", PATHS)
def test_choices_come_with_their_index(fake: FakeServer, path: str) -> None:
    body = {
        **PATHS[path],
        "n": COUNT,
        "seed": SEED,
        "max_tokens": MAX_TOKENS,
        "stream_options": {"include_usage": True},
    }
    found = stream(fake, path, **body)
    choices = [each["choices"][0] for each in found if each["choices"]]
    for i in range(COUNT):
        own = [choice for choice in choices if choice["index"] == i]
        assert "".join(map(text_of, own)) == said(asked("hello"), SEED + i, MAX_TOKENS)
        assert [choice["finish_reason"] is not None for choice in own] == [False] * (len(own) - 1) + [True]
    assert found[-1]["usage"]["completion_tokens"] == fake.post(path, **body).json()["usage"]["completion_tokens"]
    assert [("timings" in each) for each in found].count(True) == 1


def test_a_stop_string_ends_its_own_choice(fake: FakeServer) -> None:
    texts = [said(asked("hello"), SEED + i, MAX_TOKENS) for i in range(COUNT)]
    stop = texts[1][6:10]
    assert all(stop not in text for i, text in enumerate(texts) if i != 1)
    response = fake.post(CHAT, messages=HELLO, n=COUNT, seed=SEED, max_tokens=MAX_TOKENS, stop=stop).json()
    assert [text_of(choice) for choice in response["choices"]] == [texts[0], texts[1][:6], texts[2]]


def test_the_prompt_is_computed_once(fake: FakeServer) -> None:
    assert isinstance(fake.runner, FakeRunner)
    before = fake.runner.num_prompt_computed
    fake.post(CHAT, messages=HELLO, n=COUNT, max_tokens=4)
    shared = len(asked("hello")) - 1  # each feeds the last token itself, to sample after it
    assert fake.runner.num_prompt_computed - before == shared + COUNT


def test_more_choices_than_streams_are_refused(fake: FakeServer) -> None:
    refused = fake.post(CHAT, messages=HELLO, n=ENGINE.max_streams + 1, max_tokens=4)
    assert refused.status_code == 400
    assert str(ENGINE.max_streams) in refused.json()["error"]["message"]
