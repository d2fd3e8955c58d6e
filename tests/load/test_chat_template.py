"""Chat templates: what they may use, and the errors of their failures."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from types import MappingProxyType

import pytest

from slipstream.errors import RequestError
from slipstream.load.tokenizer import chat_template
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
        ("{% if %}", "cannot be used, line 1: Expected an expression"),
        ("{{ messages[0].content + 3 }}", "failed on these messages"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(10**9) }}", "failed"),
        ("{{ nothing | no_such_filter }}", "cannot be used, line 1"),
    ],
)
def test_failures_are_the_requests(source, says):
    with pytest.raises(RequestError, match=re.escape(says)):
        render(source)


def test_no_template():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render(USER)


HUGE = "(messages | length * 10**10)"  # not known when the template is compiled
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": f"{{{{ ('a' * {HUGE}) | length }}}}",
    "a long list": f"{{{{ ([0] * {HUGE}) | length }}}}",
    "doubling": "{% set x = namespace(s='12345678') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "centred": f"{{{{ 'a'.center({HUGE}) }}}}",
    "a wide number": "{{ '%10000000000d' % messages | length }}",
    "a wide field": "{{ '{:>10000000000}'.format(messages[0].content) }}",
    "a power": "{{ 9 ** (9 ** (7 + messages | length)) % 7 }}",
    "many digits": "{{ (10 ** (messages | length * 10**7)) | string }}",
    "lipsum": "{{ lipsum(n=99999) }}",
    "much text": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
}
LIMITS = "did not finish within|more than 512 MB|more than 16 million characters|failed on these messages"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_ended(name, monkeypatch):
    template = ChatTemplate({"default": f"{{% if messages[0].content == 'go' %}}{HOSTILE[name]}{{% endif %}}ok"}, {})
    assert template.render(USER) == "ok"
    with monkeypatch.context() as hurry:
        hurry.setattr(chat_template, "SECONDS", 1.0)
        with pytest.raises(RequestError, match=LIMITS):
            template.render([{"role": "user", "content": "go"}])
    assert template.render(USER) == "ok", "the next conversation is rendered"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound it")
def test_memory_is_bounded():
    with pytest.raises(RequestError, match="takes more than 512 MB"):
        render(HOSTILE["a long text"])


def test_what_is_over_its_limits_at_once_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    template = ChatTemplate({"default": HOSTILE["loops"]}, {})
    assert "did not finish within 1 seconds" in template.check()
    monkeypatch.setattr(chat_template, "SECONDS", 3600.0)
    with pytest.raises(RequestError, match="did not finish"):
        template.render(USER)


def test_a_template_that_refuses_a_question_may_take_another():
    template = ChatTemplate(
        {"default": "{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}ok"}, {}
    )
    assert "too few" in template.check()
    assert template.render([*USER, *USER]) == "ok"


def test_check_finds_nothing():
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    assert template.check() == ""


def test_messages_that_are_not_json():
    with pytest.raises(RequestError, match="not JSON"):
        render("{{ thing }}", thing=object())
    assert render("{{ thing.a }}", thing=MappingProxyType({"a": 1})) == "1"


def test_a_lone_surrogate_passes():
    """The tokenizer refuses it, with its position."""
    assert render("{{ x }}", x="a\ud800") == "a\ud800"


def test_a_long_reason_is_cut():
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('a' * 100000) }}")
    assert len(str(caught.value)) < 1000
