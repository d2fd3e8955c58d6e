"""Wrapping a stream of text at words."""

from __future__ import annotations

import random

import pytest

from slipstream.commands.word_wrap import WordWrap, width

TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n\n- one\n- two  and more\n\nEnd"


def wrapped(text: str, columns: int, seed: int) -> str:
    """Pushed in pieces of random lengths."""
    chance, wrap, shown = random.Random(seed), WordWrap(columns), ""
    while text:
        count = chance.randint(1, 7)
        shown, text = shown + wrap.push(text[:count]), text[count:]
    return shown + wrap.finish()


@pytest.mark.parametrize("columns", [8, 12, 20, 80])
def test_lines_break_at_words_only(columns: int) -> None:
    results = {wrapped(TEXT, columns, seed) for seed in range(20)}
    assert len(results) == 1, "where pieces begin does not matter"
    [shown] = results
    assert max(map(width, shown.splitlines())) <= columns
    assert shown.split() == TEXT.split()


def test_a_word_longer_than_the_line_is_not_cut() -> None:
    assert wrapped("see https://example.org/a/long/path now", 10, 0).split() == [
        "see",
        "https://example.org/a/long/path",
        "now",
    ]


def test_code_passes_as_it_is() -> None:
    code = "Look:\n```python\nprint('a long line of code, longer than that')\n```\nand now words that wrap"
    shown = wrapped(code, 20, 3)
    assert "print('a long line of code, longer than that')\n```\n" in shown
    assert "and now words that\n" in shown.replace(" \n", "\n")


def test_text_without_spaces_is_shown_as_it_comes() -> None:
    wrap = WordWrap(6)
    assert wrap.push("你好") == "你好"
    assert wrap.push("世界") == "世\n界"


def test_no_terminal_no_wrapping() -> None:
    assert WordWrap(None).push(TEXT) == TEXT
