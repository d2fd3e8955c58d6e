"""`slipstream chat`: a conversation in the terminal that streams, and shows speed and acceptance after each answer."""

from __future__ import annotations

import sys

from slipstream.commands.options import ModelOptions, load_llm
from slipstream.commands.text import summary
from slipstream.errors import RequestError
from slipstream.llm import LLM, TextEvent
from slipstream.sampling import SamplingParams

HELP = "/new starts over, /quit leaves; Ctrl-C stops an answer"


def chat(options: ModelOptions, params: SamplingParams, system: str | None) -> int:
    with load_llm(options) as llm:
        print(f"{llm.model.name} on {llm.engine.info.note}\nspeculation: {llm.speculation}\n{HELP}")
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
            if line == "/quit":
                return
            if line == "/new":
                self._messages = list(self._opening)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            answer = self._answer(messages)
        except RequestError as error:
            print(f"not sent: {error}", file=sys.stderr)
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        text, last = "", None
        try:
            for event in self._llm.stream(self._llm.chat_tokens(messages), self._params):
                print(event.text, end="", flush=True)
                text, last = text + event.text, event
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print()
        self._report(last)
        return text

    def _report(self, last: TextEvent | None) -> None:
        if last is not None and last.stats is not None:
            print(f"  [{summary(last.stats, self._llm.snapshot())}]", file=sys.stderr)


def _ask() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
