"""The `anthropic` package: messages, streams, token counts, and an answer that is begun by the client."""

from __future__ import annotations

import sys

import anthropic

HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    with anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=600) as client:
        ask(client)


def ask(client: anthropic.Anthropic) -> None:
    greedy = {"temperature": 0}  # not every release of the package has an argument for it
    name = "claude-of-today"
    message = client.messages.create(model=name, messages=HELLO, max_tokens=16, extra_body=greedy)
    assert "Paris" in message.content[0].text
    with client.messages.stream(model=name, messages=HELLO, max_tokens=16, extra_body=greedy) as stream:
        text = "".join(stream.text_stream)
    assert text == message.content[0].text
    begun = [*HELLO, {"role": "assistant", "content": "The capital of France is"}]
    rest = client.messages.create(model=name, messages=begun, max_tokens=8, extra_body=greedy)
    assert "Paris" in rest.content[0].text
    thought = client.messages.create(
        model=name, messages=HELLO, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert thought.content
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    managed = client.beta.messages.create(
        model=name, messages=HELLO, max_tokens=8, context_management=edits, betas=["context-management-2025-06-27"]
    )
    assert managed.content
    counted = client.messages.count_tokens(model=name, messages=HELLO)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    print("6 requests")


if __name__ == "__main__":
    main()
