"""Small chat templates with the features of the real ones, and the text that stands for a call in each."""

from __future__ import annotations

import json
from typing import Any

_TURN = (
    "{{ m.role[0] }}:{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
)
_BEGIN = "a:{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
_TOOLS = "{% if tools %}tools:{% for t in tools %} {{ t.function | tojson }}{% endfor %}\n{% endif %}"

HERMES = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% for c in m.tool_calls or [] %}<tool_call>\n"
    + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    + "</tool_call>{% endfor %}{{ '\\n' }}"
    + "{% endfor %}"
    + _BEGIN
    + "{% endif %}"
)
QWEN_XML = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    + "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    + "</function>\n</tool_call>{% endfor %}{{ '\\n' }}"
    + "{% endfor %}"
    + _BEGIN
    + "{% else %}<think>\n{% endif %}"
)


def hermes_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def xml_call(name: str, **arguments: Any) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
