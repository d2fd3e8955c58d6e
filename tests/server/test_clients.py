"""The real `openai` and `anthropic` clients against the real server on the default model."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
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
    told = chatgpt.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=30)
    assert told.choices[0].message.content == ANSWER
    assert told.choices[0].finish_reason == "stop"
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens, told.usage.total_tokens) == (37, 8, 45)
    timings = told.model_extra["timings"]
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
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in told) == ANSWER
    assert told[-1].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    origins = [pair for choice in told for pair in (choice.model_extra or {}).get("origins", [])]
    assert "".join(text for text, _ in origins) == ANSWER
    assert any(k > 0 for _, k in origins)
    assert len([chunk for chunk in chunks if chunk.choices]) < 2 + 8, "a step of several tokens is one chunk"


def test_chat_stop_and_seed(chatgpt: openai.OpenAI) -> None:
    told = chatgpt.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stop=["France"])
    assert told.choices[0].message.content == "The capital of "
    assert told.choices[0].finish_reason == "stop"
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
    told = chatgpt.responses.create(model=MODEL, input=PARIS, temperature=0, max_output_tokens=30)
    assert told.output_text == ANSWER
    assert told.status == "completed"
    assert told.usage is not None
    assert (told.usage.input_tokens, told.usage.output_tokens) == (37, 8)
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
        chatgpt.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="n: input should be less than or equal to 1") as caught:
        chatgpt.chat.completions.create(model=MODEL, messages=HELLO, n=2)
    assert caught.value.param == "n"
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError, match=r"prompt has 30\d\d tokens.*at most 1024") as caught:
        chatgpt.chat.completions.create(model=MODEL, messages=long)
    assert caught.value.code == "context_length_exceeded"


def test_messages(claude: anthropic.Anthropic) -> None:
    told = claude.messages.create(model=MODEL, messages=HELLO, max_tokens=30, extra_body=GREEDY)
    assert told.content[0].text == ANSWER
    assert told.stop_reason == "end_turn"
    assert (told.usage.input_tokens, told.usage.output_tokens) == (37, 8)
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
    assert final.usage.output_tokens == 8


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == 37
    blocks = [{"type": "text", "text": "You are brief."}]
    message = {"model": MODEL, "messages": HELLO, "system": blocks}
    counted = claude.messages.count_tokens(**message)
    told = claude.messages.create(**message, max_tokens=2)
    assert counted.input_tokens == told.usage.input_tokens


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools is not supported"):
        claude.messages.create(
            model=MODEL, messages=HELLO, max_tokens=3, tools=[{"name": "f", "input_schema": {"type": "object"}}]
        )
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-9", messages=HELLO, max_tokens=3)
