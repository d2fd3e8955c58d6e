"""A chat of many turns through the `openai` and `anthropic` packages: time to first token, with the prefix cache and
without, next to llama.cpp's server with its own cache. The last line is JSON.

    python chat_turns.py URL [URL of llama.cpp's server]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Any

import anthropic
import openai

TURNS = 20
MAX_TOKENS = 40
TOPICS = (
    "the sea",
    "old maps",
    "bread",
    "a railway station",
    "bees",
    "winter",
    "a bicycle",
    "the moon",
    "salt",
    "glass",
)
RULES = "Rule {}: answer in one plain sentence, name what you speak of, and never repeat an earlier sentence. "
QUESTION = (
    "This is question {} of our talk. Tell me something about {} that a traveller of the last century may have noted "
    "in a diary, then compare it with what you said before, and keep in mind that the reader has never been there, "
    "knows no foreign words and likes short sentences. "
)
Answer = tuple[float, str, int | None]  # seconds to the first text, the text, cached tokens if they were reported
Ask = Callable[[list[dict[str, str]], str, bool], Answer]


@dataclass(frozen=True)
class Turn:
    first_ms: float
    first_ms_off: float | None
    cached_tokens: int | None
    same_text: bool | None


def with_openai(url: str) -> Ask:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)

    def ask(messages: list[dict[str, str]], system: str, cached: bool) -> Answer:
        began, first, text, usage = time.perf_counter(), None, "", None
        chunks: Any = client.chat.completions.create(
            model="default",
            messages=[{"role": "system", "content": system}, *messages],  # type: ignore[list-item]
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=_switch(cached),
        )
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter()
                text += chunk.choices[0].delta.content
            usage = chunk.usage or usage
        details = getattr(usage, "prompt_tokens_details", None)
        return _seconds(began, first), text, getattr(details, "cached_tokens", None)

    return ask


def with_anthropic(url: str) -> Ask:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=600)

    def ask(messages: list[dict[str, str]], system: str, cached: bool) -> Answer:
        began, first, text = time.perf_counter(), None, ""
        body = {"temperature": 0, **_switch(cached)}
        with client.messages.stream(
            model="default",
            messages=messages,
            system=system,
            max_tokens=MAX_TOKENS,
            extra_body=body,  # type: ignore[arg-type]
        ) as stream:
            for piece in stream.text_stream:
                first = first or time.perf_counter()
                text += piece
            usage = stream.get_final_message().usage
        return _seconds(began, first), text, usage.cache_read_input_tokens

    return ask


def _switch(cached: bool) -> dict[str, bool]:
    return {} if cached else {"cache": False}


def _seconds(began: float, first: float | None) -> float:
    assert first is not None, "an answer without text"
    return first - began


def chat(ask: Ask, name: str, *, both: bool) -> Iterator[Turn]:
    """``both``: each question once more without the cache, before or after. The answer with it stays in the chat."""
    system = f"You talk through {name}. " + "".join(RULES.format(i) for i in range(1, 61))
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": QUESTION.format(turn + 1, TOPICS[turn % len(TOPICS)])})
        order = ((True, False) if turn % 2 else (False, True)) if both else (True,)
        answers = {cached: ask(messages, system, cached) for cached in order}
        first, text, num_cached = answers[True]
        off = answers.get(False)
        yield Turn(
            round(1e3 * first, 1), off and round(1e3 * off[0], 1), num_cached, None if off is None else off[1] == text
        )
        messages.append({"role": "assistant", "content": text})


def main() -> None:
    url, *others = sys.argv[1:]
    asks = {"openai": (with_openai(url), True), "anthropic": (with_anthropic(url), True)}
    if others:
        asks["llama.cpp"] = (with_openai(others[0]), False)
    for ask, _ in asks.values():
        ask([{"role": "user", "content": "Hello"}], "Be brief.", True)
    chats = {name: chat(ask, name, both=both) for name, (ask, both) in asks.items()}
    rows: dict[str, list[Turn]] = {name: [] for name in asks}
    print("turn  " + "".join(f"{name:>12}" for name in ("openai", "without", "anthropic", "without", *list(asks)[2:])))
    for turn in range(TURNS):
        for name, turns in chats.items():  # they take turns
            rows[name] += islice(turns, 1)
        shown = [value for each in rows.values() for value in (each[-1].first_ms, each[-1].first_ms_off)]
        print(f"{turn + 1:>4}  " + "".join(f"{value:>9.1f} ms" for value in shown if value is not None), flush=True)
    print(json.dumps({name: {**summary(each), "turns": [asdict(t) for t in each]} for name, each in rows.items()}))


def summary(turns: list[Turn]) -> dict[str, float | int | None]:
    """Of the turns after the first."""
    later = turns[1:]
    off = [turn.first_ms_off for turn in later if turn.first_ms_off is not None]
    return {
        "first_ms": median(turn.first_ms for turn in later),
        "first_ms_off": median(off) if off else None,
        "same_texts": sum(turn.same_text is True for turn in turns),
    }


if __name__ == "__main__":
    main()
