"""A tokenizer as llguidance sees it: the bytes of each token, and after them one token of our own, the end of output.

That token is allowed where a text is complete. Each stream has real end tokens of its own, so grammars are compiled
once for all streams, and for models without any end token too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import llguidance

if TYPE_CHECKING:
    from slipstream.load.tokenizer.tokenizer import Tokenizer

END = b"<|slipstream end of output|>"

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=5_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


@dataclass(frozen=True)
class GuidanceVocabulary:
    """The interface that llguidance wants of a tokenizer, under its names."""

    tokens: Sequence[bytes]  # END is the last
    special_token_ids: Sequence[int]
    encode: Callable[[str], list[int]]  # the model's own encoding of a text that a grammar forces
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    @property
    def eos_token_id(self) -> int:
        return len(self.tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode())

    def compiled(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.eos_token_id)  # type: ignore[arg-type]


def guidance_vocabulary(tokenizer: Tokenizer) -> GuidanceVocabulary:
    size = tokenizer.vocab_size
    tokens = [*(tokenizer.token_bytes(token, skip_special=False) for token in range(size)), END]
    special = [token for token in range(size) if tokenizer.is_special(token)]
    return GuidanceVocabulary(tokens, [*special, size], _encoder(tokenizer, tokens))


def _encoder(tokenizer: Tokenizer, tokens: Sequence[bytes]) -> Callable[[str], list[int]]:
    """Where the alphabet puts a space before a text, a piece of one would get it too: byte by byte then."""
    if tokenizer.leading:
        return by_bytes(tokens)
    return lambda text: tokenizer.encode(text, allow_special=False)


def by_bytes(tokens: Sequence[bytes]) -> Callable[[str], list[int]]:
    single = {token: i for i, token in reversed(list(enumerate(tokens))) if len(token) == 1}
    return lambda text: [single[piece] for byte in text.encode() if (piece := bytes([byte])) in single]
