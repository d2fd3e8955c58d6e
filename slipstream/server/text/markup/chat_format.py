"""How one model writes thinking and calls, read from the text of its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from slipstream.load import Tokenizer
from slipstream.server.errors import ApiError
from slipstream.server.text.markup import thinking
from slipstream.server.text.markup.call_grammar import HermesGrammar, QwenXmlGrammar, call_grammar
from slipstream.server.text.markup.calls import BEGIN, CallReader
from slipstream.server.text.markup.hermes import HermesForm
from slipstream.server.text.markup.qwen_xml import FUNCTION, QwenXmlForm
from slipstream.server.text.markup.reader import PlainReader, Reader
from slipstream.server.text.markup.thinking import ThinkingReader
from slipstream.server.text.markup.tool_prompt import with_tools
from slipstream.server.text.response_format import ResponseFormat
from slipstream.server.text.tools import ToolUse


class Thought(Enum):
    """Where an answer's thinking stands when its prompt ends."""

    NONE = "the model does not think, or was told not to"
    FREE = "the model may begin to"
    BEGUN = "the prompt has begun it"


class Dialect:
    def __init__(self, tokenizer: Tokenizer) -> None:
        text = tokenizer.template_text
        self._tokenizer = tokenizer
        self.thinks = thinking.END in text
        self._can_be_told = "enable_thinking" in text
        self._knows_tools = re.search(r"\btools\b", text) is not None
        self._xml = FUNCTION in text
        hermes = BEGIN in text and re.search(r'"arguments\\?"', text) is not None
        self._reads_calls = self._xml or hermes or not self._knows_tools

    def render(self, messages: Sequence[Mapping[str, Any]], tools: ToolUse, variables: Mapping[str, Any]) -> str:
        if not tools.tools and self._knows_tools:
            return self._tokenizer.render_chat(messages, **variables)
        if not self._reads_calls:
            raise ApiError(400, "tools: this model writes calls in a form that this server cannot read", param="tools")
        if not self._knows_tools:
            return self._tokenizer.render_chat(with_tools(messages, tools.tools), **variables)
        told = [tool.for_template() for tool in tools.tools]
        return self._tokenizer.render_chat(messages, tools=told, **variables)

    def thought(self, prompt: str) -> Thought:
        end = prompt.rstrip()
        if not self.thinks or end.endswith(thinking.END):
            return Thought.NONE
        return Thought.BEGUN if end.endswith(thinking.BEGIN) else Thought.FREE

    def begin_thinking(self, prompt: str) -> str:
        """For what has to know where thinking ends: a model that may think, and was not told not to, does."""
        free = self.thought(prompt) is Thought.FREE
        return f"{prompt}{thinking.BEGIN}\n" if free and self._can_be_told else prompt

    def reader(self, thought: Thought, tools: ToolUse) -> Reader:
        inner: Reader = PlainReader()
        if tools.tools:
            properties = {tool.name: tool.properties for tool in tools.tools}
            form = (lambda: QwenXmlForm(properties)) if self._xml else HermesForm
            inner = CallReader(form, tools.parallel)
        if not self.thinks or thought is Thought.NONE:
            return inner
        return ThinkingReader(inner, begun=thought is Thought.BEGUN)

    def look(self, tools: ToolUse, text: ResponseFormat | None) -> ResponseFormat | None:
        """What the answer has to be: a call, a text of that look, or either."""
        if tools.required or (tools.tools and text is not None):
            form = QwenXmlGrammar() if self._xml else HermesGrammar()
            return ResponseFormat(call_grammar(form, tools, None if text is None else text.spec), "tools")
        return text
