"""The `openai` package: every endpoint that it has for us, with names and fields of other servers."""

from __future__ import annotations

import sys

import openai

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=600) as client:
        ask(client)


def ask(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    chat = client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=16, temperature=0)
    assert "Paris" in chat.choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            model=model.id,
            messages=HELLO,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens
    call = client.chat.completions.create(
        model="x", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=80, parallel_tool_calls=False
    )
    assert call.choices[0].message.tool_calls[0].function.name == "weather"
    several = client.completions.create(model="x", prompt=["One, two,", "The sea is"], max_tokens=4, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1]
    answer = client.responses.create(model="gpt-5", input="What is the capital of France?", max_output_tokens=16)
    assert answer.output_text
    print("6 requests")


if __name__ == "__main__":
    main()
