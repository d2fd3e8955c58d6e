"""Requests prepared for the engine: what the chat template decides, and what grammars and budgets allow, by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import END, MARKERS, TEMPLATE, make_tokenizer
from templates import HERMES, QWEN_XML, hermes_call, xml_call

from slipstream.grammar import JsonSchema, Regex
from slipstream.sampling import SamplingParams
from slipstream.sampling.constraints import Matcher
from slipstream.sampling.masks import allows
from slipstream.sampling.matcher import matcher_for
from slipstream.server.errors import ApiError
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prepare import Preparation, Prepared
from slipstream.server.service.prompts import ChatPrompt, TextPrompt
from slipstream.server.text.markup.chat_format import ThinkingState
from slipstream.server.text.parts import Call, joined
from slipstream.server.text.pieces import Piece
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import Tool, ToolUse

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
}
WEATHER, TIME = Tool("weather", "", SCHEMA), Tool("time", "", {"type": "object", "properties": {}})
USER = [{"role": "user", "content": "hi <think>"}]
CALLS = {HERMES: hermes_call, QWEN_XML: xml_call, TEMPLATE: hermes_call}


@pytest.fixture(scope="module")
def preparations() -> Iterator[dict[str, Preparation]]:
    made = {template: Preparation(make_tokenizer(template, MARKERS)) for template in CALLS}
    yield made
    for each in made.values():
        each.close()


def ready(preparation: Preparation, variables: dict[str, Any] | None = None, **fields: Any) -> Prepared:
    fields.setdefault("params", SamplingParams())
    request = GenerationRequest(ChatPrompt(USER, variables or {}), **fields)
    prepared = preparation.prepare(request)
    return preparation.constrain(prepared) if prepared.needs_constraint else prepared


def text_of(prepared: Prepared, template: str) -> str:
    return make_tokenizer(template, MARKERS).decode(prepared.tokens, skip_special=False)


def walk(prepared: Prepared) -> Matcher:
    matcher = matcher_for(prepared.params, (END,), 101)
    assert matcher is not None
    return matcher


def follows(matcher: Matcher, text: str) -> bool:
    """Whether the text may come next, a token at a time; the matcher moves over what may."""
    for token in make_tokenizer("", MARKERS).encode(text):
        if not allows(matcher.masks([])[0], token):
            return False
        matcher.advance([token])
    return True


def may_end(matcher: Matcher) -> bool:
    return allows(matcher.masks([])[0], END)


def only_end(matcher: Matcher) -> bool:
    mask = matcher.masks([])[0]
    return [token for token in range(101) if allows(mask, token)] == [END]


@pytest.mark.parametrize(
    ("template", "variables", "state"),
    [
        (TEMPLATE, {}, ThinkingState.OFF),
        (HERMES, {}, ThinkingState.OPTIONAL),
        (HERMES, {"enable_thinking": False}, ThinkingState.OFF),
        (QWEN_XML, {}, ThinkingState.STARTED),
        (QWEN_XML, {"enable_thinking": False}, ThinkingState.OFF),
    ],
)
def test_the_thinking_state_of_a_prompt(
    preparations: dict[str, Preparation], template: str, variables: dict[str, Any], state: ThinkingState
) -> None:
    assert ready(preparations[template], variables).thinking_state is state


def test_a_budget_or_a_format_starts_optional_thinking(preparations: dict[str, Preparation]) -> None:
    plain, started = (ready(preparations[HERMES], **more) for more in ({}, {"thinking_budget": 5}))
    assert text_of(started, HERMES) == text_of(plain, HERMES) + "<think>\n"
    assert started.thinking_state is ThinkingState.STARTED
    quiet = ready(preparations[HERMES], {"enable_thinking": False}, response_format=ResponseFormat(Regex("a+"), "x"))
    assert text_of(quiet, HERMES).endswith("</think>\n\n")
    assert follows(walk(quiet), "aaa")


def test_a_model_that_does_not_think_has_no_budget(preparations: dict[str, Preparation]) -> None:
    assert ready(preparations[TEMPLATE], thinking_budget=5).params.constraint is None
    [warning] = ready(preparations[TEMPLATE], must_think=True).warnings
    assert "does not think" in warning


def test_a_budget_ends_thinking(preparations: dict[str, Preparation]) -> None:
    prepared = ready(preparations[QWEN_XML], thinking_budget=5)
    assert follows(walk(prepared), "abc</think>anything at all")
    matcher = walk(prepared)
    assert follows(matcher, "abcde")
    assert not follows(matcher, "f")
    assert follows(matcher, "\n</think>\n\nanything")


def test_a_response_format_applies_after_the_thinking(preparations: dict[str, Preparation]) -> None:
    prepared = ready(preparations[QWEN_XML], thinking_budget=5, response_format=ResponseFormat(Regex("[0-9]{2}"), "x"))
    matcher = walk(prepared)
    assert not may_end(matcher)
    assert follows(matcher, "abcde\n</think>")
    assert not follows(matcher, "x")
    assert follows(matcher, "42")
    assert only_end(matcher)


@pytest.mark.parametrize("template", CALLS)
def test_required_calls(preparations: dict[str, Preparation], template: str) -> None:
    call = CALLS[template]
    quiet = {"enable_thinking": False}
    one = call("weather", city='O"slo' if call is xml_call else "Oslo", unit="C")
    with_place = call("weather", city="", unit="F", at='{"x": 4}' if call is xml_call else {"x": 4})
    wrong = [call("weather", unit="C"), call("weather", city="a", unit="K"), call("other"), "no call"]
    tools = ToolUse((WEATHER, TIME), (WEATHER, TIME))
    for good in (one, with_place, call("time"), f"{one}\n{call('time')}\n{with_place}"):
        matcher = walk(ready(preparations[template], quiet, tools=tools))
        assert follows(matcher, good), good
        assert may_end(matcher)
        parts = joined(ready(preparations[template], quiet, tools=tools).reader().push([Piece(good, 0)]))
        assert len(parts) == good.count("</tool_call>")
        assert all(isinstance(part, Call) for part in parts)
    for bad in wrong:
        assert not follows(walk(ready(preparations[template], quiet, tools=tools)), bad), bad
    single = walk(ready(preparations[template], quiet, tools=ToolUse((WEATHER, TIME), (TIME,), parallel=False)))
    assert follows(single, call("time"))
    assert only_end(single)


@pytest.mark.parametrize("template", CALLS)
def test_a_call_or_an_answer_of_a_format(preparations: dict[str, Preparation], template: str) -> None:
    response_format = ResponseFormat(JsonSchema({"type": "boolean"}), "x")
    quiet = {"enable_thinking": False}
    for text in ("true", CALLS[template]("time")):
        matcher = walk(ready(preparations[template], quiet, response_format=response_format, tools=ToolUse((TIME,))))
        assert follows(matcher, text)
        assert may_end(matcher)
    with pytest.raises(ApiError, match="not supported"):
        ready(preparations[template], quiet, response_format=ResponseFormat(Regex("a"), "x"), tools=ToolUse((TIME,)))


def test_a_template_without_tools_gets_them_in_the_system_message(preparations: dict[str, Preparation]) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "time", "arguments": {"zone": "x"}}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]  # fmt: skip
    request = GenerationRequest(ChatPrompt(turns), SamplingParams(), tools=ToolUse((TIME,)))
    text = text_of(preparations[TEMPLATE].prepare(request), TEMPLATE)
    assert text.startswith("s:Be brief.\n\nYou can call these functions")
    assert '"name":"time"' in text
    assert 'a:<tool_call>\n{"name":"time","arguments":{"zone":"x"}}\n</tool_call>\n' in text
    assert text.endswith("u:<tool_response>\nnoon\n</tool_response>\n")


@pytest.mark.parametrize("template", ["{{ tools }}[TOOL_CALLS]", "{{ tools }}<tool_call>name <arg_key>key</arg_key>"])
def test_an_unknown_call_format_is_refused(template: str) -> None:
    preparation = Preparation(make_tokenizer(template))
    with pytest.raises(ApiError, match="a form that this server cannot read"):
        ready(preparation, tools=ToolUse((TIME,)))
    ready(preparation)
    preparation.close()


def test_bad_words_stand_at_the_beginning_and_after_a_space(preparations: dict[str, Preparation]) -> None:
    request = GenerationRequest(TextPrompt("hi"), SamplingParams(), bad_words=("no", "no", "<think>"))
    runs = preparations[TEMPLATE].prepare(request).params.bad_words
    texts = [make_tokenizer("", MARKERS).decode(run, skip_special=False) for run in runs]
    assert texts == ["no", " no", "<think>", " <think>"]
