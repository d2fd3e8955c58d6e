"""Tokenizers of every kind that we load, and compilers for them."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from slipstream.grammar import GrammarCompiler
from slipstream.load import open_model
from slipstream.load.gguf.vocab import tokenizer_from_gguf
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.token_bytes import BYTE_OF
from slipstream.load.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_tokenizer() -> Tokenizer:
    return open_model(None, None).tokenizer


@pytest.fixture(scope="session")
def compiler(default_tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(default_tokenizer)
    yield compiler
    compiler.close()


def byte_level() -> Tokenizer:
    """As from a tokenizer.json: single bytes, a few merges, two special tokens."""
    pieces = [*BYTE_OF, '{"', "tr", "ue"]
    merges = [("{", '"'), ("t", "r"), ("u", "e")]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<end>", "<other>"])
    return Tokenizer(backend, "byte_level", ChatTemplate({}, {}), (backend.token_to_id("<end>"),))


def sentencepiece() -> Tokenizer:
    """As from a GGUF: a visible space, bytes spelled out, a space put before every text."""
    letters = ["▁", *string.digits, *string.ascii_letters, *'{}[]":,.-']
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁true"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + 1)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * len(pieces),
    }
    return tokenizer_from_gguf(metadata, "test.gguf", (2,))


@pytest.fixture(scope="session", params=["default", "byte_level", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest, default_tokenizer: Tokenizer) -> Tokenizer:
    makers = {"default": lambda: default_tokenizer, "byte_level": byte_level, "sentencepiece": sentencepiece}
    return makers[request.param]()
