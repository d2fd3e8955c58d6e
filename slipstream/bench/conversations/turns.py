"""The scenarios of one conversation: `turns`, where each prompt goes on from the one before, `edit` and `restart`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.bench.conversations.chat import ChatPrompt, Conversation, Kind, Words, words_of
from slipstream.bench.conversations.settings import TurnsSettings, alternating, ask, milliseconds
from slipstream.bench.harness.llamacpp_peer import LlamaCppPeer
from slipstream.bench.harness.traffic import StreamLog
from slipstream.commands.progress import shown
from slipstream.llm import LLM

LOOP = 5  # turns from one message of the user to the next: between them tools answer
SYSTEM_SHARE = 8  # of the first prompt, one part in so many is the system message
PLACES = (0.75, 0.5, 0.25)  # of a prompt, where a message is edited
MESSAGES = 16  # of the prompt that is edited


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One prompt, answered with the cache and without it."""

    name: str
    prompt_tokens: int
    new_tokens: int  # that no earlier prompt began with, nor its answer
    cached_tokens: int
    first_ms: float
    first_ms_off: float
    same_text: bool
    peer_first_ms: float | None = None
    why: str = ""  # not more was cached


def turns(llm: LLM, settings: TurnsSettings, peer: LlamaCppPeer | None = None) -> list[TurnResult]:
    """The answers with the cache are those that the conversation goes on with. llama.cpp has its own."""
    words, chance = words_of(llm, settings.seed), random.Random(settings.seed)
    system, first = _first_prompt(words, settings.prompt)
    ours, theirs = (Conversation(system, f"turns {settings.seed}") for _ in range(2))
    rows: list[TurnResult] = []
    before: list[int] = []
    for turn in shown(range(settings.turns), "turns"):
        kind: Kind = "tool" if turn % LOOP else "user"
        added = words(chance.randint(*settings.added))
        for each in (ours, theirs) if peer is not None else (ours,):
            each.add(kind, added if turn else first)
        prompt = ours.prompt()
        logs = _both(llm, prompt, settings.new, turn)
        peer_ms = _ask_peer(peer, theirs, settings.new) if peer is not None else None
        rows.append(_row(f"{turn + 1} {kind}", prompt, before, logs, peer_ms))
        ours.add("answer", logs[True].tokens)
        before = prompt.tokens + logs[True].tokens
    return rows


def _first_prompt(words: Words, length: int) -> tuple[list[int], list[int]]:
    return words(length // SYSTEM_SHARE), words(length - length // SYSTEM_SHARE)


def _both(llm: LLM, prompt: ChatPrompt, num_new: int, turn: int) -> dict[bool, StreamLog]:
    return {cached: ask(llm.engine, prompt, num_new, cached=cached) for cached in alternating(turn)}


def _ask_peer(peer: LlamaCppPeer, conversation: Conversation, num_new: int) -> float:
    [answer] = peer.generate([conversation.prompt().tokens], num_new, ignore_eos=True, num_likeliest=1)
    conversation.add("answer", [position[0][0] for position in answer.likeliest])
    return round(1e3 * answer.first_seconds, 2)


def _row(
    name: str, prompt: ChatPrompt, before: Sequence[int], logs: dict[bool, StreamLog], peer_ms: float | None = None
) -> TurnResult:
    stats = logs[True].stats
    return TurnResult(
        name,
        len(prompt.tokens),
        len(prompt.tokens) - num_common(prompt.tokens, before),
        stats.cached_tokens,
        milliseconds(logs[True]),
        milliseconds(logs[False]),
        logs[True].tokens == logs[False].tokens,
        peer_ms,
        stats.cache_note,
    )


def num_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = zip(tokens, others)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(tokens), len(others)))


def edits(llm: LLM, settings: TurnsSettings) -> list[TurnResult]:
    """A prompt of many messages, then the same with one of them changed, each place on top of the first prompt."""
    words = words_of(llm, settings.seed + 1)
    system, rest = _first_prompt(words, settings.prompt)
    size = len(rest) // MESSAGES
    messages = [rest[i * size : (i + 1) * size] for i in range(MESSAGES)]
    base = _chat(system, messages, settings.seed)
    ask(llm.engine, base, settings.new, cached=True)
    rows = []
    for turn, place in enumerate(shown(PLACES, "edits")):
        changed = list(messages)
        changed[int(place * MESSAGES)] = words(size)
        prompt = _chat(system, changed, settings.seed)
        logs = _both(llm, prompt, settings.new, turn)
        rows.append(_row(f"at {100 * place:.0f} %", prompt, base.tokens, logs))
    return rows


def begun(llm: LLM, settings: TurnsSettings) -> Conversation:
    """A conversation of one turn, for an engine that will be started again."""
    words = words_of(llm, settings.seed + 4)
    system, first = _first_prompt(words, settings.prompt)
    conversation = Conversation(system, f"restart {settings.seed}")
    conversation.add("user", first)
    conversation.add("answer", ask(llm.engine, conversation.prompt(), settings.new, cached=True).tokens)
    return conversation


def gone_on_with(llm: LLM, settings: TurnsSettings, conversation: Conversation) -> list[TurnResult]:
    """Its next two turns. The first starts from what was stored, the second from the first."""
    words, rows = words_of(llm, settings.seed + 5), []
    for turn in range(2):
        before = conversation.prompt().tokens
        conversation.add("user", words(settings.added[1]))
        prompt = conversation.prompt()
        logs = _both(llm, prompt, settings.new, 1)  # with the cache first: without it nothing is stored
        rows.append(_row(f"{turn + 1} after", prompt, before, logs))
        conversation.add("answer", logs[True].tokens)
    return rows


def _chat(system: Sequence[int], messages: Sequence[Sequence[int]], seed: int) -> ChatPrompt:
    conversation = Conversation(system, f"edit {seed}")
    for i, message in enumerate(messages):
        conversation.add("user" if i % LOOP == 0 else "tool", message)
    return conversation.prompt()


def summary(later: Sequence[TurnResult], rows: Sequence[TurnResult]) -> dict[str, object]:
    """``later``: of all rows those that could start from the cache."""
    ratios = [row.first_ms_off / row.first_ms for row in later]
    peers = [row.peer_first_ms / row.first_ms for row in later if row.peer_first_ms is not None]
    return {
        "first_ms": median(row.first_ms for row in later),
        "first_ms_off": median(row.first_ms_off for row in later),
        "times_faster": round(median(ratios), 2),
        "peer_over_ours": round(median(peers), 2) if peers else None,
        "cached_share": round(sum(row.cached_tokens for row in later) / sum(row.prompt_tokens for row in later), 4),
        "same_texts": sum(row.same_text for row in rows),
        "texts": len(rows),
    }


def lines(rows: Sequence[TurnResult], *, texts: bool) -> list[str]:
    """``texts``: equal texts mean something."""
    peer = any(row.peer_first_ms is not None for row in rows)
    head = f"{'':>10}{'prompt':>8}{'new':>7}{'cached':>8}{'first token':>13}{'without':>9}{'times':>7}"
    return [head + (f"{'llama.cpp':>11}" if peer else ""), *(_line(row, texts) for row in rows)]


def _line(row: TurnResult, texts: bool) -> str:
    numbers = f"{row.name:>10}{row.prompt_tokens:>8}{row.new_tokens:>7}{row.cached_tokens:>8}"
    times = f"{row.first_ms:>10.1f} ms{row.first_ms_off:>9.1f}{row.first_ms_off / row.first_ms:>7.1f}"
    peer = f"{row.peer_first_ms:>11.1f}" if row.peer_first_ms is not None else ""
    other = "  ANOTHER TEXT" if texts and not row.same_text else ""
    return numbers + times + peer + other + (f"  {row.why}" if row.why else "")
