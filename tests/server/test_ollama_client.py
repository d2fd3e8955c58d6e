"""The real `ollama` client, unmodified: sync and async, streamed and whole, tools, structured output, models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import ollama
import pytest
from fake_server import FakeServer
from pydantic import BaseModel
from real_server import RealServer
from test_ollama import agent

__all__ = ["agent"]  # a fixture

PARIS = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
HELLO = [{"role": "user", "content": PARIS}]
GREEDY = {"temperature": 0, "num_predict": 30}
MODEL = "llama3.2"  # the server has one model, whatever a client calls it


def weather(city: str) -> str:
    """Look it up.

    Args:
      city: Its name
    """
    return f"sun in {city}"


class Capital(BaseModel):
    city: str
    in_europe: bool


@pytest.fixture(scope="module")
def client(real: RealServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=real.url) as client:
        yield client


@pytest.fixture
async def async_client(real: RealServer) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=real.url) as client:
        yield client


def test_chat(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HELLO, options=GREEDY)
    assert (whole.message.content, whole.done_reason, whole.model) == (ANSWER, "stop", MODEL)
    assert (whole.prompt_eval_count, whole.eval_count) == (37, 8)
    parts = list(client.chat(MODEL, HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate(client: ollama.Client) -> None:
    whole = client.generate(MODEL, PARIS, options=GREEDY)
    assert whole.response == ANSWER
    parts = list(client.generate(MODEL, PARIS, options=ollama.Options(temperature=0, num_predict=30), stream=True))
    assert "".join(part.response or "" for part in parts) == ANSWER
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert "Paris" in (client.generate(MODEL, prompt, raw=True, options=GREEDY).response or "")
    assert client.generate(MODEL).done_reason == "load"


async def test_async(async_client: ollama.AsyncClient) -> None:
    whole = await async_client.chat(MODEL, HELLO, options=GREEDY)
    assert whole.message.content == ANSWER
    stream = await async_client.chat(MODEL, HELLO, options=GREEDY, stream=True)
    assert "".join([part.message.content or "" async for part in stream]) == ANSWER
    texts = await async_client.generate(MODEL, PARIS, options=GREEDY, stream=True)
    assert "".join([part.response or "" async for part in texts]) == ANSWER
    assert [model.model for model in (await async_client.list()).models] == ["SmolLM2-135M-Instruct"]


def test_structured_output(client: ollama.Client) -> None:
    schema = Capital.model_json_schema()
    options = {**GREEDY, "num_predict": 200}
    whole = client.chat(MODEL, HELLO, format=schema, options=options)
    assert whole.message.content is not None
    Capital.model_validate_json(whole.message.content)
    text = "".join(
        part.response or "" for part in client.generate(MODEL, PARIS, format=schema, options=options, stream=True)
    )
    Capital.model_validate_json(text)
    constrained = client.generate(MODEL, PARIS, format="json", options=GREEDY).response or ""
    assert constrained.lstrip().startswith("{")


def test_tools(agent: FakeServer) -> None:
    with ollama.Client(host=agent.url) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        first = client.chat(MODEL, messages, tools=[weather]).message
        calls = [(call.function.name, dict(call.function.arguments)) for call in first.tool_calls or ()]
        assert calls == [("weather", {"city": "Oslo"}), ("time", {})]
        assert first.thinking == "hm"
        streamed = [part.message for part in client.chat(MODEL, messages, tools=[weather], stream=True)]
        found = [call.function for message in streamed for call in message.tool_calls or ()]
        assert [(call.name, dict(call.arguments)) for call in found] == calls
        messages += [first, {"role": "tool", "tool_name": "weather", "content": "sun"}]
        assert client.chat(MODEL, messages, tools=[weather]).message.content == "Sun."
        assert client.chat(MODEL, messages, think=False).message.thinking is None


def test_log_probabilities(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None
    assert "".join(each.token for each in whole.logprobs).startswith(ANSWER)
    assert all(len(each.top_logprobs or ()) == 2 for each in whole.logprobs)


def test_models(client: ollama.Client) -> None:
    [listed] = client.list().models
    assert listed.model == "SmolLM2-135M-Instruct"
    assert listed.size is not None
    assert listed.size > 1e6
    assert listed.details is not None
    assert (listed.details.format, listed.details.quantization_level) == ("gguf", "Q4_1")
    [running] = client.ps().models
    assert running.context_length == 1024
    shown = client.show(listed.model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 1024
    assert shown.capabilities == ["completion", "tools"]


def test_errors(client: ollama.Client) -> None:
    def failure(work: Any, *args: Any, **more: Any) -> str:
        with pytest.raises(ollama.ResponseError) as caught:
            work(*args, **more)
        assert caught.value.status_code in (400, 404)
        return str(caught.value.error)

    assert "images" in failure(client.generate, MODEL, "what is it?", images=[b"\x89PNG"])
    assert "mirostat" in failure(client.chat, MODEL, HELLO, options={"mirostat": 2})
    assert "embeddings" in failure(client.embed, MODEL, "a text")
    assert "embeddings" in failure(client.embeddings, MODEL, "a text")
    for work in (client.pull, client.push, client.delete):
        assert "one model" in failure(work, MODEL)
    assert "one model" in failure(client.copy, MODEL, "other")
    assert "one model" in failure(client.create, MODEL, from_="other")
    with pytest.raises(ollama.ResponseError, match="num_predict"):
        next(client.chat(MODEL, HELLO, options={"num_predict": -9}, stream=True))
