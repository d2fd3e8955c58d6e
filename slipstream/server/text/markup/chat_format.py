"""How one model marks thinking and tool calls, derived from the text of its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from slipstream.errors import RequestError, TemplateLimit
from slipstream.load import Tokenizer
from slipstream.server.errors import ApiError
from slipstream.server.text.markup import thinking
from slipstream.server.text.markup.call_grammar import HermesGrammar, QwenXmlGrammar, call_grammar
from slipstream.server.text.markup.call_history import CallHistory, Recall
from slipstream.server.text.markup.calls import BEGIN, OnCall, ToolCallReader
from slipstream.server.text.markup.hermes import HermesParser
from slipstream.server.text.markup.qwen_xml import FUNCTION, QwenXmlParser
from slipstream.server.text.markup.reader import PlainReader, Reader
from slipstream.server.text.markup.thinking import ThinkingReader
from slipstream.server.text.markup.tool_prompt import with_tools
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import ToolUse


class ThinkingState(Enum):
    """The state of an answer's thinking at the end of the prompt."""

    OFF = "the model does not think, or thinking is disabled"
    OPTIONAL = "the model decides whether to think"
    STARTED = "the prompt ends inside the thinking"


class ChatFormat:
    def __init__(self, tokenizer: Tokenizer) -> None:
        text = tokenizer.template_text
        self._tokenizer = tokenizer
        self.thinks = thinking.END in text
        self._has_thinking_switch = "enable_thinking" in text
        self._knows_tools = re.search(r"\btools\b", text) is not None
        self._xml = FUNCTION in text
        hermes = BEGIN in text and re.search(r'"arguments\\?"', text) is not None
        self.reads_calls = self._xml or hermes or not self._knows_tools
        self._history = CallHistory(tokenizer, self._xml, self._knows_tools)

    def as_sampled(self, messages: Sequence[Mapping[str, Any]], recall: Recall) -> Sequence[Mapping[str, Any]]:
        """The messages, with the calls that are known as the model wrote them."""
        return self._history.as_sampled(messages, recall)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: ToolUse, variables: Mapping[str, Any]) -> str:
        """If the template refuses several system messages, or one in the middle, they become one at the beginning."""
        try:
            return self._render(messages, tools, variables)
        except TemplateLimit:
            raise
        except RequestError:
            joined = one_system_message(messages)
            if joined == messages:
                raise
        return self._render(joined, tools, variables)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: ToolUse, variables: Mapping[str, Any]) -> str:
        if not tools.tools and self._knows_tools:
            return self._tokenizer.render_chat(messages, **variables)
        if not self.reads_calls:
            raise ApiError(400, "tools: this model writes calls in a form that this server cannot read", param="tools")
        if not self._knows_tools:
            return self._tokenizer.render_chat(with_tools(messages, tools.tools), **variables)
        functions = [tool.for_template() for tool in tools.tools]
        return self._tokenizer.render_chat(messages, tools=functions, **variables)

    def prefilled(self, prompt: str, content: str, thought: str) -> tuple[str, ThinkingState]:
        """The prompt with the beginning of the answer. Without content, its thinking is continued."""
        state = self.thinking_state(prompt)
        if not self.thinks:
            return prompt + content, ThinkingState.OFF
        if thought and state is ThinkingState.OPTIONAL:
            prompt, state = f"{prompt}{thinking.BEGIN}\n", ThinkingState.STARTED
        if state is ThinkingState.STARTED and not content:
            return prompt + thought, state
        if state is ThinkingState.STARTED:
            prompt = f"{prompt}{thought}\n{thinking.END}\n\n"
        return prompt + content, ThinkingState.OFF

    def thinking_state(self, prompt: str) -> ThinkingState:
        end = prompt.rstrip()
        if not self.thinks or end.endswith(thinking.END):
            return ThinkingState.OFF
        return ThinkingState.STARTED if end.endswith(thinking.BEGIN) else ThinkingState.OPTIONAL

    def start_thinking(self, prompt: str) -> str:
        """The prompt with the thinking started, where it is optional: grammars and budgets must see its end."""
        optional = self.thinking_state(prompt) is ThinkingState.OPTIONAL
        return f"{prompt}{thinking.BEGIN}\n" if optional and self._has_thinking_switch else prompt

    def reader(self, thinking_state: ThinkingState, tools: ToolUse, on_call: OnCall) -> Reader:
        inner: Reader = PlainReader()
        if tools.tools:
            properties = {tool.name: tool.properties for tool in tools.tools}
            make_parser = (lambda: QwenXmlParser(properties)) if self._xml else HermesParser
            inner = ToolCallReader(make_parser, tools.parallel, on_call)
        if not self.thinks or thinking_state is ThinkingState.OFF:
            return inner
        return ThinkingReader(inner, started=thinking_state is ThinkingState.STARTED)

    def enforced_format(self, tools: ToolUse, text_format: ResponseFormat | None) -> ResponseFormat | None:
        """The format that a grammar must enforce: a tool call, a text of ``text_format``, or either."""
        if tools.required or (tools.tools and text_format is not None):
            grammar = QwenXmlGrammar() if self._xml else HermesGrammar()
            spec = call_grammar(grammar, tools, None if text_format is None else text_format.spec)
            return ResponseFormat(spec, "tools")
        return text_format


def one_system_message(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else messages
