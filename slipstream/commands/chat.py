"""`slipstream chat`: a conversation in the terminal that streams, and shows speed and acceptance after each answer.

Colour and prompt sign only where there is a terminal: piped in and out, it is questions in, answers out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.commands.options import ModelOptions, load_llm
from slipstream.commands.text import dim, show, summary
from slipstream.errors import RequestError, printable
from slipstream.llm import LLM, TextEvent
from slipstream.sampling import SamplingParams

HELP = "/new starts over, /quit leaves, Ctrl-C stops an answer"


def chat(options: ModelOptions, sampling: Mapping[str, Any], system: str | None) -> int:
    """``sampling``: the parameters that were given; the others are the model's defaults."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and editing

    with load_llm(replace(options, max_streams=1)) as llm:
        defaults = options.sampling_of(llm.model)
        params = SamplingParams(**defaults.merged(sampling))
        show(f"{llm.model.name} on {llm.engine.info.note}")
        print(dim(f"sampling defaults: {defaults}\nspeculation: {llm.speculation}\n{HELP}", sys.stdout))
        Conversation(llm, params, system).run()
    return 0


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def run(self) -> None:
        while (line := _ask()) is not None:
            match line.split():
                case ["/quit" | "/exit"]:
                    return
                case ["/new"]:
                    self._messages = list(self._opening)
                    print(dim("a new conversation", sys.stdout))
                case [word, *_] if word.startswith("/"):
                    print(dim(f"{word} is no command: {HELP}", sys.stdout))
                case [_, *_]:
                    self._turn(line)

    def _turn(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            answer = self._answer(messages)
        except RequestError as error:
            print(f"not sent: {printable(str(error))}; /new starts over", file=sys.stderr)
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        text, last = "", None
        try:
            for event in self._llm.stream(self._llm.chat_tokens(messages), self._params):
                print(event.text, end="", flush=True)
                text, last = text + event.text, event
        except KeyboardInterrupt:
            print(dim(" [stopped]", sys.stdout), end="")
        print(flush=True)
        self._report(last)
        return text

    def _report(self, last: TextEvent | None) -> None:
        if last is not None and last.stats is not None:
            print(dim(summary(last.stats), sys.stderr), file=sys.stderr)


def _ask() -> str | None:
    terminal = sys.stdin.isatty()
    try:
        return input("\n> " if terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if terminal:
            print()
        return None
