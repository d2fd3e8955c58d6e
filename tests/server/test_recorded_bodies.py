"""Bodies of known clients, whole and streamed: an answer, or a refusal that says what is not supported.

On three kinds of models: one that thinks and has tools, one whose template has neither, and one whose template insists
that the system message comes first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from fake_server import ENGINE, MARKERS, TEMPLATE, WAIT, FakeServer, events, make_tokenizer
from recorded_bodies import Recorded, recorded
from scripted_runner import ScriptedRunner
from templates import HERMES

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be the first') }}{% endif %}{% endfor %}"
)
TEMPLATES = {"thinks": HERMES, "plain": TEMPLATE, "system first": SYSTEM_FIRST + HERMES}
ANSWER, OBJECT = "Fine.", '{"title": "x"}'
SEVERAL_SYSTEM_MESSAGES = ("codex", "claude_code")
BODIES = recorded()


def cases(bodies: list[Recorded]) -> list[Any]:
    """Every body on the first model, and those on the others that show something new; the rest is exhaustive."""
    found = []
    for kind in TEMPLATES:
        for each in bodies:
            new = kind == "thinks" or (kind == "system first" and each.client in SEVERAL_SYSTEM_MESSAGES)
            marks = () if new else pytest.mark.exhaustive
            found.append(pytest.param(kind, each, marks=marks, id=f"{kind}-{each}"))
    return found


class Model:
    """A server whose model gives the answer that a test wants, after a thought if its template has thinking."""

    def __init__(self, template: str) -> None:
        self.answer = ANSWER
        self.thinks = "think" in template
        tokenizer = make_tokenizer(template, MARKERS)
        self.runner = ScriptedRunner(tokenizer, self._script, max_context=1 << 15, num_blocks=1 << 15)
        self.server = FakeServer(self.runner, tokenizer=tokenizer, engine=replace(ENGINE, max_step_tokens=4096))

    def _script(self, prompt: str) -> str:
        """It thinks in a chat that has not begun or ended its thinking; a bare text is only continued."""
        if not self.thinks or not prompt.endswith(("a:", "<think>\n")):
            return self.answer
        start = "<think>\n" if prompt.endswith("a:") else ""
        return f"{start}hm\n</think>\n\n{self.answer}"

    def post(self, each: Recorded, **changes: Any) -> httpx.Response:
        url = self.server.url + each.path
        return httpx.post(url, json=each.body | changes, headers=each.headers, timeout=WAIT)


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[[str], Model]]:
    """By the name of a template: each is started once, when it is asked for first."""
    with ExitStack() as stack:

        @cache
        def started(template: str) -> Model:
            found = Model(TEMPLATES[template])
            stack.enter_context(found.server)
            return found

        yield started


@pytest.fixture
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


def text_of(path: str, found: dict[str, Any]) -> str:
    """The text of a complete response, of which the last message, if there are several."""
    match path:
        case "/v1/chat/completions":
            return str(found["choices"][0]["message"]["content"])
        case "/v1/responses":
            return str(found["output"][-1]["content"][0]["text"])
        case "/v1/messages":
            return str(found["content"][-1]["text"])
        case "/api/chat":
            return str(found["message"]["content"])
        case "/api/generate":
            return str(found["response"])
        case "/completion":
            return str(found["content"])
    raise AssertionError(path)


def piece_of(path: str, event: dict[str, Any]) -> str:
    match path:
        case "/v1/chat/completions":
            return event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
        case "/v1/responses":
            return event["delta"] if event["type"] == "response.output_text.delta" else ""
        case "/v1/messages":
            return event.get("delta", {}).get("text", "")
    return text_of(path, event)


def is_last(path: str, event: dict[str, Any]) -> bool:
    """Whether a client knows from it that the answer is whole. Where [DONE] says so, it is the event before."""
    match path:
        case "/v1/chat/completions":
            return "usage" in event or event["choices"][0]["finish_reason"] is not None
        case "/v1/responses":
            return event["type"] in ("response.completed", "response.incomplete")
        case "/v1/messages":
            return event["type"] == "message_stop"
        case "/completion":
            return bool(event["stop"])
    return bool(event["done"])


def streamed(path: str, response: httpx.Response) -> list[dict[str, Any]]:
    if path.startswith("/api/"):
        return [json.loads(line) for line in response.text.splitlines()]
    return events(iter(response.text.splitlines()))


def is_cut(each: Recorded) -> bool:
    return each.body.get("max_tokens") == 1


@pytest.mark.parametrize(("model", "each"), cases([each for each in BODIES if not each.refused]), indirect=["model"])
def test_it_is_answered(model: Model, each: Recorded) -> None:
    path = each.path.partition("?")[0]
    model.answer = OBJECT if each.json else ANSWER
    whole = model.post(each, stream=False)
    assert whole.status_code == 200, whole.text
    if path.endswith("/count_tokens"):
        assert whole.json()["input_tokens"] > 0
        return
    if each.whole_only or each.no_text:
        return
    prompt = model.runner.prompts[-1]
    assert [text for text in each.prompt_has if text not in prompt] == []
    if not is_cut(each):
        assert text_of(path, whole.json()) == model.answer
    stream = model.post(each, stream=True)
    assert stream.status_code == 200, stream.text
    found = streamed(path, stream)
    assert is_last(path, found[-1])
    if not is_cut(each):
        assert "".join(piece_of(path, event) for event in found) == model.answer


@pytest.mark.parametrize(("model", "each"), cases([each for each in BODIES if each.refused]), indirect=["model"])
def test_it_is_refused_by_that_word(model: Model, each: Recorded) -> None:
    for streaming in (False, True):
        response = model.post(each, stream=streaming)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert str(each.refused) in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("model", ["thinks"], indirect=True)
def test_log_likelihoods_of_several_prompts(model: Model) -> None:
    """As lm-eval asks for them: each prompt's own tokens, and one more."""
    [each] = [each for each in BODIES if each.whole_only]
    choices = model.post(each).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    lengths = [len(prompt) for prompt in each.body["prompt"]]
    for choice, length in zip(choices, lengths, strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["tokens"]) == length + 1
