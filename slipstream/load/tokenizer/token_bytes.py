"""The bytes each token stands for. Text is the concatenation of bytes, so a token may hold half a character.

Two alphabets exist: byte-level BPE writes every byte as one printable character; SentencePiece writes text with a
visible space and spells other bytes as <0xNN>. Knows neither merging nor templates.
"""

from __future__ import annotations

import re
from typing import Literal

Alphabet = Literal["byte_level", "sentencepiece"]

VISIBLE_SPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 stands for itself; the other bytes follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_characters()


def bytes_of(piece: str, alphabet: Alphabet) -> bytes:
    return _sentencepiece_bytes(piece) if alphabet == "sentencepiece" else _byte_level_bytes(piece)


def _byte_level_bytes(piece: str) -> bytes:
    codes = [BYTE_OF.get(character) for character in piece]
    known = [code for code in codes if code is not None]
    return bytes(known) if len(known) == len(codes) else piece.encode("utf-8", "replace")


def _sentencepiece_bytes(piece: str) -> bytes:
    if match := BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(VISIBLE_SPACE, " ").encode("utf-8", "replace")
