"""Thinking and calls read out of text: the parts depend on the text alone, not on the pieces it came in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.server.text.markup.calls import ToolCallReader
from slipstream.server.text.markup.hermes import HermesParser
from slipstream.server.text.markup.qwen_xml import QwenXmlParser
from slipstream.server.text.markup.reader import PlainReader, Reader
from slipstream.server.text.markup.thinking import ThinkingReader
from slipstream.server.text.parts import Call, Part, Text, Thinking, joined
from slipstream.server.text.pieces import Piece

SCHEMA = {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}, "unit": {"enum": ["C"]}}
MAKERS: dict[str, Callable[[], Reader]] = {
    "hermes": lambda: ToolCallReader(HermesParser),
    "hermes, one call": lambda: ToolCallReader(HermesParser, parallel=False),
    "xml": lambda: ToolCallReader(lambda: QwenXmlParser({"weather": SCHEMA})),
    "thinking": lambda: ThinkingReader(PlainReader(), started=False),
    "thinking, started": lambda: ThinkingReader(PlainReader(), started=True),
    "thinking, xml": lambda: ThinkingReader(ToolCallReader(lambda: QwenXmlParser({"weather": SCHEMA})), started=True),
}


def read(reader: Reader, chunks: Sequence[str]) -> list[Part]:
    """All of it; origins are the number of the chunk."""
    parts: list[Part] = []
    for number, chunk in enumerate(chunks):
        parts += reader.push([Piece(chunk, number)])
    return joined([*parts, *reader.finish()])


def plain(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case Text():
                found.append(("text", part.text))
            case Thinking():
                found.append(("thinking", part.text))
            case Call(name, arguments):
                assert name is not None
                found.append(("call", name, arguments))
    return found


def parts_of(kind: str, text: str) -> list[tuple[str, ...]]:
    """Read at once, and character by character: the same."""
    whole = plain(read(MAKERS[kind](), [text] if text else []))
    assert plain(read(MAKERS[kind](), list(text))) == whole
    return whole


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}</tool_call>\\"", "b": [1, {}]}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (" just text \n", [("text", " just text \n")]),
        (CALL, [("call", "f", ARGUMENTS)]),
        (f"Let me see.\n\n{CALL}\n", [("text", "Let me see."), ("call", "f", ARGUMENTS)]),
        (f"{CALL}\n{CALL}\n bye ", [("call", "f", ARGUMENTS), ("call", "f", ARGUMENTS), ("text", "bye ")]),
        ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', [("call", "f", '{"x":1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [("call", "f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>ok', [("call", "f", '{"x": 1}'), ("text", "ok")]),
        ('<tool_call>{"name": "f", "arguments": {"x": {</tool_call>ok', [("call", "f", '{"x": {'), ("text", "ok")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "cut', [("call", "f", '{"x": "cut')]),
        ("a <tool_call> b", [("text", "a <tool_call> b")]),
        ("a <tool_call>{bad}</tool_call> b", [("text", "a <tool_call>{bad}</tool_call> b")]),
        ("a <tool_call>{never closed", [("text", "a <tool_call>{never closed")]),
        ("<tool_call> " + CALL, [("text", "<tool_call>"), ("call", "f", ARGUMENTS)]),
        ("a <tool_", [("text", "a <tool_")]),
    ],
)  # fmt: skip
def test_hermes(text: str, parts: list[tuple[str, ...]]) -> None:
    assert parts_of("hermes", text) == parts


def test_without_parallel_calls_the_first_one_is_the_last() -> None:
    assert parts_of("hermes, one call", f"hm {CALL}\n{CALL} more") == [("text", "hm"), ("call", "f", ARGUMENTS)]
    reader = MAKERS["hermes, one call"]()
    reader.push([Piece(CALL[:-1], 0)])
    assert not reader.done
    reader.push([Piece(CALL[-1:], 0)])
    assert reader.done


def xml(name: str = "weather", **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (xml(), [("call", "weather", "{}")]),
        (xml(city="Zürich \"x\"\n<b>"), [("call", "weather", '{"city": "Zürich \\"x\\"\\n<b>"}')]),
        (xml(city=""), [("call", "weather", '{"city": ""}')]),
        (xml(city="5", days="5", unit="C"), [("call", "weather", '{"city": "5", "days": 5, "unit": "C"}')]),
        (xml(where='{"lat": 1.5}', days="many"), [("call", "weather", '{"where": {"lat": 1.5}, "days": "many"}')]),
        (xml("other", x="True", y="[1]", z="NaN"), [("call", "other", '{"x": true, "y": [1], "z": "NaN"}')]),
        (f"Ok.\n{xml()}\n{xml(days='1')}",
         [("text", "Ok."), ("call", "weather", "{}"), ("call", "weather", '{"days": 1}')]),
        ("<tool_call><function=f><parameter=a>1</parameter></tool_call>!", [("call", "f", '{"a": 1}'), ("text", "!")]),
        ("<tool_call><function=f>junk <b> <function=g></function></tool_call>", [("call", "f", "{}")]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nPar", [("call", "weather", '{"city": "Par')]),
        ("say <tool_call> <func> done", [("text", "say <tool_call> <func> done")]),
        ("<tool_call><function=", [("text", "<tool_call><function=")]),
    ],
)  # fmt: skip
def test_qwen_xml(text: str, parts: list[tuple[str, ...]]) -> None:
    assert parts_of("xml", text) == parts


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        ("thinking", "\n<think>\nso\nit is \n</think>\n\n 42 ", [("thinking", "so\nit is"), ("text", "42 ")]),
        ("thinking", "<think>\n\n</think>\n\n42", [("text", "42")]),
        ("thinking", " plain <think>x</think>", [("text", " plain <think>x</think>")]),
        ("thinking", "<think>a</think>b<think>c</think>", [("thinking", "a"), ("text", "b<think>c</think>")]),
        ("thinking", "<thi", [("text", "<thi")]),
        ("thinking, started", "\nso </thin</think>42", [("thinking", "so </thin"), ("text", "42")]),
        ("thinking, started", "never ends\n", [("thinking", "never ends\n")]),
        ("thinking, xml", f"a {xml()} b</think>\n{xml()}", [("thinking", f"a {xml()} b"), ("call", "weather", "{}")]),
    ],
)  # fmt: skip
def test_thinking(kind: str, text: str, parts: list[tuple[str, ...]]) -> None:
    assert parts_of(kind, text) == parts


def test_pieces_keep_their_origin() -> None:
    parts = read(MAKERS["thinking"](), ["<th", "ink>a", "b</", "think>", " c", "d"])
    assert parts == [Thinking([Piece("a", 1), Piece("b", 2)]), Text([Piece("c", 4), Piece("d", 5)])]


BITS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", "<", "x", '{"name": "f", "arguments": ', "{", "}",
    '"', "\\", '{"a": 1}', "<function=weather>", "</function>", "<parameter=city>", "<parameter=days>", "</parameter>",
    "</", "5", "<function=", ">", CALL, xml(city="a", days="2"),
])  # fmt: skip


@st.composite
def cut_text(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(BITS, max_size=14)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    return text, [text[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=400, deadline=None)
@given(cut_text())
def test_any_splitting_gives_the_same_parts(kind: str, given_text: tuple[str, list[str]]) -> None:
    text, chunks = given_text
    assert plain(read(MAKERS[kind](), chunks)) == parts_of(kind, text)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["city", "note"]), st.text(max_size=20)), st.data())
def test_string_values_come_through_as_they_are(values: dict[str, str], data: Any) -> None:
    values = {key: value for key, value in values.items() if "</parameter>" not in value}
    reader = ToolCallReader(lambda: QwenXmlParser({"f": {key: {"type": "string"} for key in values}}))
    text = xml("f", **values)
    size = data.draw(st.integers(1, 7))
    [call] = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == values


def test_nothing_is_held_that_is_decided() -> None:
    """Each push returns at once all that is certain."""
    reader = ToolCallReader(HermesParser)
    pushed = [plain(joined(reader.push([Piece(text, 0)]))) for text in ("a", " ", "b <", "c", "\n")]
    assert pushed == [[("text", "a")], [], [("text", " b")], [("text", " <c")], []]
    steps = ["<tool_call>", '{"name": "f", ', '"arguments": {"x"', ": 1", "}}", "</tool_call>"]
    calls = [[(part.name, part.arguments) for part in reader.push([Piece(text, 0)])] for text in steps]  # type: ignore[union-attr]
    assert calls == [[], [], [("f", ""), (None, '{"x"')], [(None, ": 1")], [(None, "}")], []]
