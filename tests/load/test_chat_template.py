"""Chat templates: what they may use, and the errors of their failures."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from slipstream.errors import RequestError
from slipstream.load.tokenizer.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hé <b>"}]


def render(source: str, /, **variables) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(USER, **variables)


def test_variables():
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}"
    assert render(source, enable_thinking=False) == "<s>hé <b>>False"
    assert render(source, add_generation_prompt=False) == "<s>hé <b>"


def test_variables_do_not_replace_the_messages():
    assert render("{{ messages[0].role }}", messages="x") == "user"


def test_blocks_leave_no_whitespace():
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"


def test_tojson_is_plain_json():
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hé <b>"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_loop_controls_and_generation_blocks():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% if %}", "refused"),
        ("{{ messages[0].content + 3 }}", "failed on these messages"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(10**9) }}", "failed"),
    ],
)
def test_failures_are_the_requests(source, says):
    with pytest.raises(RequestError, match=re.escape(says)):
        render(source)


def test_no_template():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render(USER)
