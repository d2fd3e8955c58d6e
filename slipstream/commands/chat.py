"""`slipstream chat`: a conversation in the terminal that streams, and shows speed and acceptance after each answer.

Colour, prompt sign and wrapping only where there is a terminal: piped in and out, it is questions in, answers out.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.commands.options import ModelOptions, load_llm
from slipstream.commands.text import dim, show, summary
from slipstream.commands.word_wrap import WordWrap
from slipstream.errors import RequestError, SlipstreamError, printable
from slipstream.llm import LLM, TextEvent
from slipstream.sampling import SamplingParams

QUOTES = '"""'
HINT = f"/help lists the commands; Ctrl-C stops an answer; {QUOTES} begins and ends a text of several lines"
COMMANDS = {
    "/help": "this list",
    "/new": "start over",
    "/system TEXT": "another system prompt; without TEXT: show it",
    "/set NAME VALUE": "another setting of the sampling, e.g. /set temperature 0.7; without NAME: show them",
    "/drafts on|off": "draft or not; the text is the same either way",
    "/save FILE": "write the conversation as Markdown; as JSON if FILE ends with .json",
    "/quit": "leave, as Ctrl-D does",
}
SETTINGS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
}
Message = dict[str, str]


def chat(options: ModelOptions, sampling: Mapping[str, Any], system: str | None) -> int:
    """``sampling``: the parameters that were given; the others are the model's defaults."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and editing

    with load_llm(replace(options, max_streams=1)) as llm:
        defaults = options.sampling_of(llm.model)
        params = SamplingParams(**defaults.merged(sampling))
        show(f"{llm.model.name} on {llm.engine.info.note}")
        _note(f"sampling defaults: {defaults}\nspeculation: {llm.speculation}\n{HINT}")
        if fault := llm.tokenizer.check_chat():
            _note(f"a plain question fails: {printable(fault)}; `slipstream generate --raw` continues a text")
        Conversation(llm, params, system).run()
    return 0


class Typed(NamedTuple):
    text: str
    quoted: bool  # between quotes: no command


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system or ""
        self._turns: list[Message] = []

    @property
    def _messages(self) -> list[Message]:
        opening = [{"role": "system", "content": self._system}] if self._system else []
        return [*opening, *self._turns]

    def run(self) -> None:
        while (typed := _ask()) is not None:
            if typed.text.startswith("/") and not typed.quoted:
                if not self._command(*typed.text.partition(" ")[::2]):
                    return
            elif typed.text:
                self._turn(typed.text)

    def _command(self, word: str, rest: str) -> bool:
        """False: the user leaves."""
        rest = rest.strip()
        match word:
            case "/quit" | "/exit":
                return False
            case "/help":
                _note("\n".join(f"{name:<18}{what}" for name, what in COMMANDS.items()))
            case "/new":
                self._turns = []
                _note("a new conversation")
            case "/system":
                self._system = rest or self._system
                _note(f"system prompt: {self._system or 'none'}")
            case "/set":
                self._set(*rest.replace("=", " ").split())
            case "/drafts" if rest in ("on", "off"):
                self._params = replace(self._params, draft="off" if rest == "off" else None)
                _note(f"drafts: {rest}")
            case "/save" if rest:
                self._save(Path(rest).expanduser())
            case _:
                usage = [name for name in COMMANDS if name.split()[0] == word]
                _note(f"that is {usage[0]}" if usage else f"{word} is no command: {HINT}")
        return True

    def _set(self, *words: str) -> None:
        if not words:
            _note("\n".join(f"{name:<20}{getattr(self._params, name)}" for name in SETTINGS))
            return
        name = words[0].replace("-", "_")
        try:
            value: Any = SETTINGS[name](words[1])
            self._params = replace(self._params, **{name: value})
            _note(f"{name}: {value}")
        except KeyError:
            _note(f"{words[0]} is no setting; there are {', '.join(SETTINGS)}")
        except (IndexError, ValueError):
            _note(f"{name} takes {'a whole number' if SETTINGS[name] is int else 'a number'}")
        except SlipstreamError as error:
            _note(str(error))

    def _save(self, path: Path) -> None:
        if path.suffix == ".json":
            text = json.dumps(self._messages, ensure_ascii=False, indent=1)
        else:
            text = "\n\n".join(f"**{message['role']}**\n\n{message['content']}" for message in self._messages)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _note(f"{path} cannot be written: {error.strerror}")
            return
        _note(f"{len(self._messages)} messages in {path}")

    def _turn(self, text: str) -> None:
        question = {"role": "user", "content": text}
        try:
            answer = self._answer([*self._messages, question])
        except RequestError as error:
            print(f"not sent: {printable(str(error)).rstrip('.')}; /new starts over", file=sys.stderr)
            return
        self._turns += [question, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[Message]) -> str:
        text, last = "", None
        wrap = WordWrap(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
        try:
            for event in self._llm.stream(self._llm.chat_tokens(messages), self._params):
                print(wrap.push(event.text), end="", flush=True)
                text, last = text + event.text, event
            print(wrap.finish(), end="")
        except KeyboardInterrupt:
            print(wrap.finish() + dim(" [stopped]", sys.stdout), end="")
        print(flush=True)
        self._report(last)
        return text

    def _report(self, last: TextEvent | None) -> None:
        if last is not None and last.stats is not None:
            print(dim(summary(last.stats), sys.stderr), file=sys.stderr)


def _note(text: str) -> None:
    print(dim(text, sys.stdout), flush=True)


def _ask() -> Typed | None:
    """None: the user leaves."""
    line = _line("\n> ")
    if line is None or not line.lstrip().startswith(QUOTES):
        return None if line is None else Typed(line.strip(), quoted=False)
    text = line.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        line = _line(". ")
        if line is None:
            return None
        text += f"\n{line}"
    return Typed(text.rstrip().removesuffix(QUOTES).strip("\n"), quoted=True)


def _line(prompt: str) -> str | None:
    terminal = sys.stdin.isatty()
    try:
        return input(prompt if terminal else "")
    except (EOFError, KeyboardInterrupt):
        if terminal:
            print()
        return None
