"""The `ollama` package: lists, facts, chats and texts, whole and streamed."""

from __future__ import annotations

import sys

import ollama

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"temperature": 0, "num_predict": 16}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


def main() -> None:
    with ollama.Client(host=sys.argv[1], timeout=600) as client:
        ask(client)


def ask(client: ollama.Client) -> None:
    [model] = client.list().models
    assert model.model
    assert client.show(model.model).details.family
    chat = client.chat("llama3.2:latest", messages=HELLO, options=SHORT, keep_alive="5m")
    assert "Paris" in chat.message.content
    parts = list(client.chat(model.model, messages=HELLO, options=SHORT, stream=True))
    assert "".join(part.message.content for part in parts) == chat.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == chat.eval_count > 0
    assert parts[-1].eval_duration > 0
    text = client.generate(model.model, prompt="The capital of France is", raw=True, options=SHORT)
    assert text.response
    pieces = list(client.generate(model.model, prompt="The capital of France is", raw=True, options=SHORT, stream=True))
    assert "".join(piece.response for piece in pieces) == text.response
    formatted = client.chat(model.model, messages=HELLO, format=SCHEMA, options={"num_predict": 40})
    assert "city" in formatted.message.content
    print("7 requests")


if __name__ == "__main__":
    main()
