"""Where the messages of a rendered chat end, in tokens: the positions up to which later prompts are likely to be the
same.

Most chat templates begin every message with the same special token (`<|im_start|>`). It is found by rendering a probe
with and without generation prompt. Models without such a token have no boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slipstream.engine.request import Boundary
from slipstream.errors import RequestError
from slipstream.load import Tokenizer

PROBE = ({"role": "user", "content": "Hello"},)
BEGINNING = 32  # tokens of a message that show its role, and whether it is the result of a tool
ROLE = re.compile(r"\s*(\w+)")
BY_USER = re.compile(r"\s*user\b(?!(?:<[^<>]*>|\s)*<tool_response>)")
SYSTEM_ROLES = ("system", "developer")


class MessageBoundaries:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start: int | None = None  # the token that begins a message
        self._known = False

    def learn(self) -> None:
        """Renders the probe, the first time. May wait for the process that renders."""
        if not self._known:
            self._start = self._find_start()
            self._known = True

    def _find_start(self) -> int | None:
        try:
            without, whole = (self._tokenizer.render_chat(PROBE, add_generation_prompt=add) for add in (False, True))
        except RequestError:
            return None
        if not whole.startswith(without) or whole == without:
            return None
        first = self._tokenizer.encode(whole[len(without) :])[0]
        return first if self._tokenizer.is_special(first) else None

    def of(self, tokens: Sequence[int]) -> tuple[tuple[int, Boundary], ...]:
        """In a prompt that ends with a generation prompt and possibly the beginning of an answer.

        Rising positions, of which two may be the same. What the next turn sends differs after the last one: templates
        write a finished answer otherwise than the prompt for one.
        """
        starts = list(self._starts(tokens))
        found: list[tuple[int, Boundary]] = []
        if (system := self._after_system(tokens, starts)) is not None:
            found.append((system, "system"))
        for begin, end in zip(starts[-2::-1], starts[:0:-1]):
            if BY_USER.match(self._beginning(tokens, begin)):
                found.append((end, "user"))
                break
        found += [(starts[-1], "prompt")] if starts else []
        return tuple((position, reason) for position, reason in found if position)

    def _starts(self, tokens: Sequence[int]) -> Iterator[int]:
        at = -1
        while self._start is not None:
            try:
                at = tokens.index(self._start, at + 1)
            except ValueError:
                return
            yield at

    def _after_system(self, tokens: Sequence[int], starts: Sequence[int]) -> int | None:
        """The first message that is none of the system, if one of the system comes before it."""
        for i, start in enumerate(starts):
            role = ROLE.match(self._beginning(tokens, start))
            if role is None or role[1] not in SYSTEM_ROLES:
                return start if i else None
        return None

    def _beginning(self, tokens: Sequence[int], start: int) -> str:
        return self._tokenizer.decode(tokens[start + 1 : start + 1 + BEGINNING], skip_special=False)
