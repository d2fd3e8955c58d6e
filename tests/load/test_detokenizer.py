"""Streaming: the pieces joined are the whole, and no piece shows half a character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.load import StreamingDetokenizer, open_tokenizer

TEXT = "Zoë 👩‍👩‍👧‍👦 says 你好，世界 🎉🎉 — ¡olé! 𝔘𝔫𝔦"

# The default vocabulary lacks the bytes of some control characters and of the planes from 4 on.
SPELLABLE = st.characters(categories=["L", "M", "N", "P", "S", "Zs"], max_codepoint=0x3FFFF)


@pytest.fixture(scope="session")
def tokenizer(default_gguf):
    return open_tokenizer(default_gguf)


def split(ids: list[int], positions: list[int]) -> list[list[int]]:
    edges = [0, *sorted(position % (len(ids) + 1) for position in positions), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@settings(max_examples=300)
@given(
    ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 300), st.integers(0, 20)), max_size=60),
    positions=st.lists(st.integers(0, 100), max_size=20),
    skip=st.booleans(),
)
def test_pieces_joined_are_the_whole(tokenizer, ids, positions, skip):
    detokenizer = StreamingDetokenizer(tokenizer, skip_special=skip)
    text = "".join(detokenizer.push(piece) for piece in split(ids, positions)) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=200)
@given(text=st.text(SPELLABLE, max_size=20))
def test_valid_text_never_shows_a_replacement(tokenizer, text):
    ids = tokenizer.encode(text, allow_special=False)
    detokenizer = StreamingDetokenizer(tokenizer)
    shown = ""
    for token in ids:
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def test_emoji_and_cjk_are_split_across_tokens(tokenizer):
    """The test above means something only if characters really are split."""
    detokenizer = StreamingDetokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in tokenizer.encode(TEXT)]
    assert "" in pieces
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


def test_unfinished_character_appears_at_the_end_only(tokenizer):
    first, *_ = tokenizer.encode("👩")
    detokenizer = StreamingDetokenizer(tokenizer)
    assert detokenizer.push([first]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(tokenizer.encode("ok")) == "ok"


def test_work_does_not_grow_with_the_text(tokenizer, monkeypatch):
    calls = 0
    original = type(tokenizer).token_bytes

    def counting(self, *args):
        nonlocal calls
        calls += 1
        return original(self, *args)

    monkeypatch.setattr(type(tokenizer), "token_bytes", counting)
    detokenizer = StreamingDetokenizer(tokenizer)
    for token in tokenizer.encode("word " * 200):
        detokenizer.push([token])
    assert calls == len(tokenizer.encode("word " * 200))


def test_sentencepiece_space_is_dropped_once():
    from slipstream.load.gguf.vocab import tokenizer_from_gguf

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "▁", "a", "▁a"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1],
    }
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    detokenizer = StreamingDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in (3, 3, 2)] == ["a", " a", "a"]
    assert tokenizer.decode([3, 3, 2]) == "a aa"
