"""Tool calls of earlier turns as the model wrote them.

A client sends a call back as JSON: keys may be in another order, numbers and spaces may be spelled otherwise. Rendered
from that, the prompt would differ from what the model sampled, and the prefix cache would end there. So a call that is
known by its id, with the same name and arguments, is rendered from the sampled text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from slipstream.errors import RequestError
from slipstream.load import Tokenizer
from slipstream.server.text.json_text import same_json, strict_json
from slipstream.server.text.markup.calls import SampledCall
from slipstream.server.text.markup.hermes import sampled_arguments
from slipstream.server.text.markup.qwen_xml import sampled_values

Message = Mapping[str, Any]
Recall = Callable[[str], SampledCall | None]  # by the call's id
NAME, XML_VALUE, JSON_VALUE = "probe", "a  b", '{"a":  1}'


class CallHistory:
    """``xml``: calls have Qwen's XML format. ``in_template``: the chat template writes them."""

    def __init__(self, tokenizer: Tokenizer, xml: bool, in_template: bool) -> None:
        self._tokenizer, self._xml, self._in_template = tokenizer, xml, in_template

    def as_sampled(self, messages: Sequence[Message], recall: Recall) -> Sequence[Message]:
        """The messages, with the calls that are known as they were sampled."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        return [self._message(message, recall) if message.get("tool_calls") else message for message in messages]

    def _message(self, message: Message, recall: Recall) -> Message:
        return {**message, "tool_calls": [self._call(call, recall) for call in message["tool_calls"]]}

    def _call(self, call: Mapping[str, Any], recall: Recall) -> Mapping[str, Any]:
        found, function = recall(call.get("id") or ""), call["function"]
        if found is None or found.name != function["name"] or not _same(found.arguments, function["arguments"]):
            return call
        if not self._in_template:
            return {**call, "sampled": found.text}
        arguments = self._arguments(found)
        in_order = strict_json(found.arguments or "{}") if arguments is None else arguments
        return {**call, "function": {**function, "arguments": in_order}}

    def _arguments(self, found: SampledCall) -> str | dict[str, str] | None:
        """So that the template prints the sampled text; None if it cannot."""
        values = sampled_values(found.text) if self._xml else sampled_arguments(found.text)
        return values if values is not None and self._takes_text else None

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template prints arguments that are texts as they are: all of them together, or in XML each."""
        given = {"a": XML_VALUE} if self._xml else JSON_VALUE
        printed = f"<parameter=a>\n{XML_VALUE}\n</parameter>" if self._xml else f'"arguments": {JSON_VALUE}}}'
        call = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": given}}
        probe = (
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Hello", "tool_call_id": "call_1"},
        )
        try:
            return printed in self._tokenizer.render_chat(probe)
        except RequestError:
            return False


def _same(sampled: str, given: Any) -> bool:
    try:
        return same_json(strict_json(sampled or "{}"), given)
    except ValueError:
        return False
