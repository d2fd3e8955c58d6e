"""Where the prefix cache is told to keep states: at the ends of messages, in tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from fake_server import make_tokenizer

from slipstream.engine.request import Boundary
from slipstream.load import Tokenizer
from slipstream.sampling import SamplingParams
from slipstream.server.protocols.anthropic.messages import CountTokensRequest
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prepare import Preparation
from slipstream.server.service.prompts import ChatPrompt, Prefill, TextPrompt
from slipstream.server.text.tools import NO_TOOLS, Tool, ToolUse

START, END = "<|im_start|>", "<|im_end|>"
# As Qwen's: tools belong to the system message, results are a message of the user, history loses its thinking.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# As Gemma's: no system message.
TURNS = (
    "{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
# As Phi's: each role has a token of its own.
ROLE_TOKENS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = (START, END, "<|system|>", "<|user|>", "<|assistant|>")
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1"}
TOOLS = ToolUse((Tool("f", "", {"type": "object"}),))


def chat_tokenizer(template: str = CHATML, special: Sequence[str] = SPECIAL) -> Tokenizer:
    return make_tokenizer(template, special=special)


def texts(
    tokenizer: Tokenizer, prompt: ChatPrompt | TextPrompt, tools: ToolUse = NO_TOOLS
) -> dict[Boundary, tuple[str, str]]:
    """By boundary, the text before and after it."""
    request = GenerationRequest(prompt, SamplingParams(), tools=tools)
    prepared = Preparation(tokenizer).prepare(request)
    positions = [position for position, _ in prepared.cache.boundaries]
    assert positions == sorted(positions)
    return {
        reason: (
            tokenizer.decode(prepared.tokens[:position], skip_special=False),
            tokenizer.decode(prepared.tokens[position:], skip_special=False),
        )
        for position, reason in prepared.cache.boundaries
    }


def chat(*messages: dict[str, Any]) -> ChatPrompt:
    return ChatPrompt(messages)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chat_tokenizer()


def test_a_conversation(tokenizer: Tokenizer) -> None:
    found = texts(tokenizer, chat(SYSTEM, ASK, {"role": "assistant", "content": "hi"}, ASK))
    assert found["system"][0] == f"{START}system\nBe brief.{END}\n"
    assert found["prompt"][1] == f"{START}assistant\n<think>\n"
    assert found["user"] == found["prompt"], "the last message is the user's"


def test_tools_belong_to_the_system_message(tokenizer: Tokenizer) -> None:
    for messages in ((SYSTEM, ASK), (ASK,)):
        before, after = texts(tokenizer, chat(*messages), TOOLS)["system"]
        assert '"name": "f"' in before
        assert after.startswith(f"{START}user\nhello")
    assert "system" not in texts(tokenizer, chat(ASK))


def test_results_of_tools_are_not_written_by_a_user(tokenizer: Tokenizer) -> None:
    found = texts(tokenizer, chat(SYSTEM, ASK, CALLING, RESULT, RESULT))
    assert found["user"][0].endswith(f"{START}user\nhello{END}\n")
    assert found["user"][1].startswith(f"{START}assistant\n<tool_call>")
    assert found["prompt"][0].endswith(f"</tool_response>{END}\n")


def test_an_empty_message_of_the_user_is_one(tokenizer: Tokenizer) -> None:
    found = texts(tokenizer, chat(ASK, CALLING, {"role": "user", "content": ""}, CALLING, RESULT))
    assert found["user"][0].endswith(f"{START}user\n{END}\n")


def test_a_started_answer_comes_after_the_last_boundary(tokenizer: Tokenizer) -> None:
    found = texts(tokenizer, ChatPrompt((SYSTEM, ASK), prefill=Prefill("It is", "Hm.")))
    assert found["prompt"][0].endswith(f"hello{END}\n")
    assert found["prompt"][1].endswith("It is")


def test_the_next_turn_repeats_everything_before_the_last_boundary(tokenizer: Tokenizer) -> None:
    turn = (SYSTEM, ASK)
    before, _ = texts(tokenizer, chat(*turn))["prompt"]
    later = tokenizer.render_chat([*turn, {"role": "assistant", "content": "hi"}, ASK])
    assert later.startswith(before)


def test_a_template_without_a_system_message() -> None:
    found = texts(chat_tokenizer(TURNS), chat(ASK, {"role": "assistant", "content": "hi"}, ASK))
    assert set(found) == {"user", "prompt"}
    assert found["prompt"][1] == f"{START}model\n"


def test_a_template_with_a_token_for_each_role() -> None:
    found = texts(chat_tokenizer(ROLE_TOKENS), chat(SYSTEM, ASK, {"role": "assistant", "content": "hi"}, ASK))
    assert set(found) == {"prompt"}
    assert found["prompt"][1] == "<|assistant|>\n"


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (CHATML, ()),  # the token is ordinary text
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_start|>", SPECIAL),  # no switch
        ("{{ raise_exception('no') }}", SPECIAL),
    ],
)
def test_without_such_a_token_there_are_none(template: str, special: tuple[str, ...]) -> None:
    preparation = Preparation(chat_tokenizer(template, special))
    preparation._boundaries.learn()
    assert preparation._boundaries.of(preparation._tokenizer.encode(f"{START}system\nx{END}\n{START}assistant\n")) == ()


def test_a_completion_has_none(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, TextPrompt(f"{START}user\nhello{END}\n{START}assistant\n")) == {}


def test_long_prompts_are_cheap(tokenizer: Tokenizer) -> None:
    """A tool loop of 100k tokens in 500 messages: looked through much faster than it is tokenised."""
    turn = tokenizer.encode(f"{START}user\n<tool_response>\n" + "x" * 400 + END)
    tokens = [*tokenizer.encode(f"{START}user\nhello{END}"), *turn * 250, *tokenizer.encode(f"{START}assistant\n")]
    preparation = Preparation(tokenizer)
    preparation._boundaries.learn()
    began = time.process_time()
    found = preparation._boundaries.of(tokens)
    assert time.process_time() - began < 0.1
    assert [reason for _, reason in found] == ["user", "prompt"]


def test_anthropic_systems_begin_after_the_billing_line(tokenizer: Tokenizer) -> None:
    billing = "x-anthropic-billing-header: cc_version=2; cch=1;\n"
    request = CountTokensRequest.model_validate({"system": billing + "Be brief.", "messages": [ASK]})
    assert texts(tokenizer, request.prompt())["system"][0] == f"{START}system\nBe brief.{END}\n"
