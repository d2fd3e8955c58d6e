"""Text that comes in pieces, wrapped at words for a terminal. A word is shown when it is whole."""

from __future__ import annotations

import re
import unicodedata

FENCE = "```"
TOKEN = re.compile(r"\n|[^\S\n]+|\S+")


def width(text: str) -> int:
    """In columns of a terminal."""
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cc", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class WordWrap:
    """``columns``: None: text passes as it is. So does what stands between code fences."""

    def __init__(self, columns: int | None) -> None:
        self._columns = columns
        self._column = 0
        self._held = ""  # the beginning of a word, or spaces that a new line may swallow
        self._line = ""  # what the line says so far, to know fences
        self._in_code = False

    def push(self, text: str) -> str:
        if self._columns is None:
            return text
        *whole, self._held = TOKEN.findall(self._held + text) or [""]
        if self._held == "\n" or self._in_code or (self._held and _columns(self._held[-1]) == 2):
            whole, self._held = [*whole, self._held], ""
        return "".join(self._placed(each) for each in whole)

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return self._placed(rest) if rest else ""

    def _placed(self, token: str) -> str:
        assert self._columns is not None
        if token == "\n":
            return self._new_line()
        self._line += token
        if self._in_code:
            return token
        return "".join(self._word(part) for part in _parts(token))

    def _new_line(self) -> str:
        if self._line.strip().startswith(FENCE):
            self._in_code = not self._in_code
        self._line, self._column = "", 0
        return "\n"

    def _word(self, word: str) -> str:
        assert self._columns is not None
        columns = width(word)
        if self._column + columns > self._columns and self._column:
            self._column = 0 if word.isspace() else columns
            return "\n" if word.isspace() else "\n" + word
        self._column += columns
        return word


def _parts(token: str) -> list[str]:
    """Each wide character is a word of its own: Chinese and Japanese have no spaces."""
    parts = [""]
    for char in token:
        if _columns(char) == 2:
            parts += [char, ""]
        else:
            parts[-1] += char
    return [part for part in parts if part]
