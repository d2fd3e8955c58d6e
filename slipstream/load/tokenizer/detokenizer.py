"""Token ids -> text while they arrive. Holds back the bytes of an incomplete character, nothing else.

Work per token does not depend on the length of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from slipstream.load.tokenizer.tokenizer import Tokenizer


class StreamingDetokenizer:
    """The pushes and the finish, joined, are `tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, ids: Iterable[int]) -> str:
        raw = b"".join(self._tokenizer.token_bytes(token, self._skip_special) for token in ids)
        return self._decoder.decode(self._trim(raw))

    def finish(self) -> str:
        """The text of an unfinished character. The detokenizer is then ready for another answer."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = True
        return rest

    def _trim(self, raw: bytes) -> bytes:
        """SentencePiece puts a space before every text; it is not part of the answer."""
        if not raw or not self._at_start:
            return raw
        self._at_start = False
        return raw.removeprefix(self._tokenizer.leading)
