"""The real `openai` and `anthropic` clients against the real server on the default model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from real_server import RealServer

PARIS = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MODEL = "SmolLM2-135M-Instruct"
GREEDY = {"temperature": 0}  # not every release of the client has an argument for it
HELLO = [{"role": "user", "content": PARIS}]


@pytest.fixture(scope="module")
def chatgpt(real: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def claude(real: RealServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_chat(chatgpt: openai.OpenAI) -> None:
    response = chatgpt.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=30)
    assert response.choices[0].message.content == ANSWER
    assert response.choices[0].finish_reason == "stop"
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (37, 8, 45)
    timings = response.model_extra["timings"]
    assert timings["predicted_n"] == 8
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]


def test_chat_stream(chatgpt: openai.OpenAI) -> None:
    stream = chatgpt.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_origins": True},
    )
    chunks = list(stream)
    response = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in response) == ANSWER
    assert response[-1].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    origins = [pair for choice in response for pair in (choice.model_extra or {}).get("origins", [])]
    assert "".join(text for text, _ in origins) == ANSWER
    assert any(k > 0 for _, k in origins)
    assert len([chunk for chunk in chunks if chunk.choices]) < 2 + 8, "a step of several tokens is one chunk"


def test_chat_stop_and_seed(chatgpt: openai.OpenAI) -> None:
    response = chatgpt.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stop=["France"])
    assert response.choices[0].message.content == "The capital of "
    assert response.choices[0].finish_reason == "stop"
    twice = [
        chatgpt.chat.completions.create(model=MODEL, messages=HELLO, temperature=1.0, seed=7, max_tokens=12)
        for _ in range(2)
    ]
    assert twice[0].choices[0].message.content == twice[1].choices[0].message.content


@pytest.mark.parametrize("streaming", [False, True])
def test_completions(chatgpt: openai.OpenAI, streaming: bool) -> None:
    whole = chatgpt.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8)
    text = whole.choices[0].text
    assert text.startswith(" Paris") or text.strip()
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    if streaming:
        stream = chatgpt.completions.create(
            model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text


def test_responses(chatgpt: openai.OpenAI) -> None:
    response = chatgpt.responses.create(model=MODEL, input=PARIS, temperature=0, max_output_tokens=30)
    assert response.output_text == ANSWER
    assert response.status == "completed"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (37, 8)
    short = chatgpt.responses.create(model=MODEL, input=HELLO, temperature=0, max_output_tokens=3, store=False)
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_responses_stream(chatgpt: openai.OpenAI) -> None:
    with chatgpt.responses.stream(model=MODEL, input=PARIS, temperature=0, max_output_tokens=30) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == ANSWER


def test_models(chatgpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [model.id for model in chatgpt.models.list()] == [MODEL]
    assert chatgpt.models.retrieve(MODEL).object == "model"
    assert [model.id for model in claude.models.list()] == [MODEL]


def test_openai_errors(chatgpt: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'"):
        chatgpt.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="n should be a whole number from 1 to 16") as caught:
        chatgpt.chat.completions.create(model=MODEL, messages=HELLO, n=17)
    assert caught.value.param == "n"
    wrong = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    look = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: nothing") as caught:
        chatgpt.chat.completions.create(model=MODEL, messages=HELLO, response_format=look)
    assert caught.value.param == "response_format.json_schema.schema.properties.a"
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError, match=r"prompt has 30\d\d tokens.*at most 1024") as caught:
        chatgpt.chat.completions.create(model=MODEL, messages=long)
    assert caught.value.code == "context_length_exceeded"


def num_input(usage: Any) -> int:
    """Anthropic counts cached tokens apart."""
    return int(usage.input_tokens + usage.cache_read_input_tokens)


def test_messages(claude: anthropic.Anthropic) -> None:
    response = claude.messages.create(model=MODEL, messages=HELLO, max_tokens=30, extra_body=GREEDY)
    assert response.content[0].text == ANSWER
    assert response.stop_reason == "end_turn"
    assert (num_input(response.usage), response.usage.output_tokens) == (37, 8)
    short = claude.messages.create(model=MODEL, messages=HELLO, max_tokens=3, extra_body=GREEDY)
    assert short.stop_reason == "max_tokens"
    cut = claude.messages.create(
        model=MODEL, messages=HELLO, max_tokens=30, extra_body=GREEDY, stop_sequences=["France"]
    )
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "France", "The capital of ")


def test_messages_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, messages=HELLO, max_tokens=30, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ANSWER
    assert final.stop_reason == "end_turn"
    assert (num_input(final.usage), final.usage.output_tokens) == (37, 8)


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == 37
    blocks = [{"type": "text", "text": "You are brief."}]
    message = {"model": MODEL, "messages": HELLO, "system": blocks}
    counted = claude.messages.count_tokens(**message)
    response = claude.messages.create(**message, max_tokens=2)
    assert counted.input_tokens == num_input(response.usage)


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0 .* images cannot be read here"):
        claude.messages.create(model=MODEL, messages=[{"role": "user", "content": [picture]}], max_tokens=3)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=MODEL, messages=HELLO, max_tokens=0)


def test_what_anthropic_s_agents_send_is_answered(claude: anthropic.Anthropic) -> None:
    """A name of another model, a tool that a server would run, thinking, and the beginning of the answer."""
    messages = [*HELLO, {"role": "assistant", "content": "The capital of"}]
    response = claude.messages.create(
        model="claude-9",
        messages=messages,
        max_tokens=2048,
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
        extra_body=GREEDY,
    )
    assert response.content[0].text == ANSWER.removeprefix("The capital of")
    assert [warning.split()[0] for warning in response.warnings] == ["tools.0", "thinking"]


# Calls that have to come, from a model that was never taught any: the grammar sees to it.

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = [{"role": "user", "content": "How warm is it in Paris?"}]
SAMPLED = {"temperature": 1.0, "seed": 7}


def is_call(name: str, arguments: object) -> bool:
    jsonschema.validate(arguments, SCHEMA)
    return name == "weather"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_chat_required_call(chatgpt: openai.OpenAI, choice: Any, streaming: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    asked: dict[str, Any] = {"model": MODEL, "messages": WEATHER, "tools": tools, "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, "max_tokens": 150, **SAMPLED}
    if streaming:
        with chatgpt.chat.completions.stream(**asked) as events:
            response = events.get_final_completion()
    else:
        response = chatgpt.chat.completions.create(**asked)
    assert response.choices[0].finish_reason == "tool_calls"
    assert response.choices[0].message.content in (None, "")
    [call] = response.choices[0].message.tool_calls
    assert is_call(call.function.name, json.loads(call.function.arguments))
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    then = chatgpt.chat.completions.create(
        model=MODEL, messages=[*WEATHER, message, result], tools=tools, temperature=0, max_tokens=20
    )
    assert then.choices[0].message.content


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_messages_required_call(claude: anthropic.Anthropic, choice: Any, streaming: bool) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": MODEL, "messages": WEATHER, "tools": tools, "tool_choice": choice}
    asked |= {"max_tokens": 150, "extra_body": SAMPLED}
    if streaming:
        with claude.messages.stream(**asked) as events:
            response = events.get_final_message()
    else:
        response = claude.messages.create(**asked)
    [block] = response.content
    assert (response.stop_reason, block.type) == ("tool_use", "tool_use")
    assert is_call(block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "21 degrees"}
    turns = [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    then = claude.messages.create(
        model=MODEL, messages=[*WEATHER, *turns], tools=tools, max_tokens=20, extra_body=GREEDY
    )
    assert then.content[0].text


def test_responses_required_call_and_format(chatgpt: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    asked: dict[str, Any] = {"model": MODEL, "input": WEATHER, "max_output_tokens": 150, "extra_body": {"seed": 7}}
    response = chatgpt.responses.create(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False)
    [item] = response.output
    assert is_call(item.name, json.loads(item.arguments))
    look = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    jsonschema.validate(json.loads(chatgpt.responses.create(**asked, text=look).output_text), SCHEMA)


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"guided_grammar": 'start: "<" /[a-z]{2,5}/ ">"'}, r"<[a-z]{2,5}>"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, r"a[0-9]b"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, r"true|false"),
        ({"guided_json": '{"enum": [1, "x"]}'}, r'1|"x"'),
    ],
)
def test_response_formats(chatgpt: openai.OpenAI, more: dict[str, Any], pattern: str) -> None:
    response = chatgpt.chat.completions.create(model=MODEL, messages=WEATHER, max_tokens=60, seed=3, extra_body=more)
    assert re.fullmatch(pattern, response.choices[0].message.content or "")
    text = chatgpt.completions.create(model=MODEL, prompt="Well,", max_tokens=60, seed=3, extra_body=more)
    assert re.fullmatch(pattern, text.choices[0].text)


class Weather(BaseModel):
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]
    days: list[int] = Field(max_length=3)


def test_the_clients_own_models(chatgpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """As their users write it: a class in, an object out."""
    chat = chatgpt.chat.completions.parse(
        model=MODEL, messages=WEATHER, response_format=Weather, max_tokens=200, seed=5, temperature=0.7
    )
    assert isinstance(chat.choices[0].message.parsed, Weather)
    response = chatgpt.responses.parse(
        model=MODEL,
        input=WEATHER,
        text_format=Weather,
        max_output_tokens=200,
        extra_body={"seed": 5, "temperature": 1.0},
    )
    assert isinstance(response.output_parsed, Weather)
    message = claude.messages.parse(
        model=MODEL, messages=WEATHER, output_format=Weather, max_tokens=200, extra_body={"seed": 5, "temperature": 1.0}
    )
    assert isinstance(message.parsed_output, Weather)


def test_bad_words_and_min_tokens(chatgpt: openai.OpenAI) -> None:
    more = {"bad_words": ["Paris", "capital"], "min_tokens": 30}
    response = chatgpt.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=40, extra_body=more
    )
    text = response.choices[0].message.content or ""
    assert "Paris" not in text
    assert "capital" not in text
    assert response.usage is not None
    assert response.usage.completion_tokens >= 30
