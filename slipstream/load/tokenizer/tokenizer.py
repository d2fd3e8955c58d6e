"""Text <-> token ids, and chat messages -> token ids, over one `tokenizers` object.

Does not know the file of the vocabulary: hf/tokenizer.py and gguf/vocab.py build these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from slipstream.errors import RequestError
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.library_faults import library_faults
from slipstream.load.tokenizer.token_bytes import Alphabet, bytes_of


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        alphabet: Alphabet,
        template: ChatTemplate,
        eos_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        leading: bytes = b"",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._alphabet = alphabet
        self._template = template
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.leading = leading  # put before every text by the alphabet, removed by decoding
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A second object that reads special tokens in the text as plain characters."""
        twin = tokenizers.Tokenizer.from_str(self._backend.to_str())
        twin.encode_special_tokens = True
        return twin

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.sources)

    @property
    def template_text(self) -> str:
        """The whole source of the chat template: it shows the markup that the model was trained to write."""
        return "\n".join(self._template.sources.values())

    def encode(self, text: str, add_special: bool = False, allow_special: bool = True) -> list[int]:
        """`add_special`: with BOS, where the model wants it. `allow_special`: read <|x|> as a token."""
        _check_text(text)
        backend = self._backend if allow_special else self._literal
        with library_faults(RequestError, "The model's tokenizer failed on this text"):
            # As a batch of one: the library then lets other threads run, and leaves out offsets nobody asked for.
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        raw = b"".join(self.token_bytes(token, skip_special) for token in ids)
        return raw.removeprefix(self.leading).decode("utf-8", "replace")

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes of one token; none for an id outside the vocabulary."""
        if skip_special and self.is_special(token):
            return b""
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        return token in self._added and self._added[token].special

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].content.encode("utf-8", "replace")
        piece = self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        return b"" if piece is None else bytes_of(piece, self._alphabet)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        return self._template.render(messages, tools, add_generation_prompt, **template_kwargs)

    def check_chat(self) -> str:
        """Why a plain question cannot be put into the chat template; empty if it can."""
        return self._template.check() if self.has_chat_template else "the model has no chat template"

    def close(self) -> None:
        """Ends the processes of the chat template; they start again when they are needed."""
        self._template.close()

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """The template writes BOS itself where the model wants it."""
        return self.encode(self.render_chat(messages, **template_kwargs))


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"The prompt should be text, it is a {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text is not valid Unicode: a lone surrogate stands at character {error.start}."
        ) from error
