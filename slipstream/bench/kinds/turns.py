"""`slipstream bench turns`: prompts that begin like earlier ones, with the prefix cache and without, in one engine.

Both ways take turns. A request without the cache neither starts from it nor leaves anything there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory

from slipstream.bench.conversations import agents, crowd, turns
from slipstream.bench.conversations.chat import Conversation, words_of
from slipstream.bench.conversations.settings import AGENTS, RESTART, TurnsSettings, ask
from slipstream.bench.conversations.traces import Session, load_sessions
from slipstream.bench.harness.llamacpp_peer import LlamaCppPeer, open_peer
from slipstream.bench.harness.loaded_engine import SLACK, loaded, watch_memory, with_room
from slipstream.bench.harness.report import check_writable, headline, write_report
from slipstream.bench.kinds.peer import gguf_of
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.errors import ConfigError
from slipstream.llm import LLM

SPARE_STATES = 16  # recurrent ones to keep, at least
SHARE_OF_POOL = 0.1  # and memory for more of them, next to that for KV


def bench_turns(options: ModelOptions, settings: TurnsSettings, to: ReportOptions) -> int:
    check_writable(to)
    if options.prefix_cache == "off":
        raise ConfigError("bench turns compares the prefix cache on and off by itself: leave out --prefix-cache off")
    if AGENTS in settings.scenarios:
        _sessions(settings)  # or the others would be measured, and lost
    sized = _with_room(options, settings)
    with _peer(options, settings) as peer, loaded(sized) as (llm, memory):
        print(headline(options, llm.engine.info))
        _warm_up(llm, settings)
        scenarios = _Scenarios(llm, settings, peer, texts=not options.simulate_acceptance)
        results = {name: scenarios.run(name) for name in settings.scenarios if name != RESTART}
        print(memory.line())
        taken = memory.report()
        note = peer.note if peer is not None else None
    if RESTART in settings.scenarios:
        results[RESTART] = _restart(sized, settings, texts=not options.simulate_acceptance)
    if note:
        print(f"llama.cpp: {note}")
    kept = {"settings": asdict(settings), "peer": note, "results": results, "memory": taken}
    write_report("turns", options, to, kept)
    return 0


def _with_room(options: ModelOptions, settings: TurnsSettings) -> ModelOptions:
    """For all that runs at once and, next to it, a conversation that nobody holds."""
    count = max(settings.streams, settings.sessions) + 1
    sized = with_room(options, [settings.longest] * count)
    if options.kv_memory is not None or sized.kv_memory is None:
        return sized
    kept = watch_memory(sized).plan.kept_state
    return replace(sized, kv_memory=int((1 + SHARE_OF_POOL) * sized.kv_memory) + SPARE_STATES * kept)


@contextmanager
def _peer(options: ModelOptions, settings: TurnsSettings) -> Iterator[LlamaCppPeer | None]:
    if not settings.peer:
        yield None
        return
    with gguf_of(options) as path, open_peer(path, 1, True, settings.longest + SLACK, caching=True) as peer:
        yield peer


def _warm_up(llm: LLM, settings: TurnsSettings) -> None:
    """A long prompt and a short one that goes on from it: neither is measured."""
    words = words_of(llm, settings.seed - 1)
    conversation = Conversation(words(settings.prompt), "warm-up")
    for _ in range(2):
        conversation.add("user", words(settings.added[0]))
        for cached in (True, False):
            log = ask(llm.engine, conversation.prompt(), settings.new, cached=cached)
        conversation.add("answer", log.tokens)


def _restart(options: ModelOptions, settings: TurnsSettings, *, texts: bool) -> dict[str, object]:
    """A turn, then another process's worth of engine over the same folder."""
    print(f"\n{RESTART}: {TITLES[RESTART]}")
    with TemporaryDirectory() as folder:
        storing = replace(options, cache_dir=options.cache_dir or folder)
        with loaded(storing) as (llm, _):
            conversation = turns.begun(llm, settings)
        with loaded(storing) as (llm, _):
            _warm_up(llm, settings)
            return _shown_turns(turns.gone_on_with(llm, settings, conversation), first=0, texts=texts)


def _shown_turns(rows: list[turns.TurnResult], *, first: int, texts: bool) -> dict[str, object]:
    found = turns.summary(rows[first:] or rows, rows)
    print("\n".join(turns.lines(rows, texts=texts)))
    print(_sentence(found, texts), flush=True)
    return {**found, "turns": [asdict(row) for row in rows]}


class _Scenarios:
    """Runs one and prints it; what belongs into the report."""

    def __init__(self, llm: LLM, settings: TurnsSettings, peer: LlamaCppPeer | None, *, texts: bool) -> None:
        self._llm, self._settings, self._peer = llm, settings, peer
        self._texts = texts  # equal ones mean something

    def run(self, name: str) -> dict[str, object]:
        print(f"\n{name}: {TITLES[name]}")
        match name:
            case "turns":
                rows = turns.turns(self._llm, self._settings, self._peer)
                return _shown_turns(rows, first=1, texts=self._texts)
            case "edit":
                return _shown_turns(turns.edits(self._llm, self._settings), first=0, texts=self._texts)
            case "fan-out":
                return self._crowd(crowd.fan_out(self._llm, self._settings), shared=True)
            case "cold":
                return self._crowd(crowd.cold(self._llm, self._settings), shared=False)
        return self._agents()

    def _crowd(self, rows: list[crowd.CrowdResult], *, shared: bool) -> dict[str, object]:
        found = crowd.summary(rows, self._settings, shared=shared)
        print(_sentence(found, self._texts), flush=True)
        rounds = [{key: value for key, value in asdict(row).items() if key != "tokens"} for row in rows]
        return {**found, "rounds": rounds}

    def _agents(self) -> dict[str, object]:
        sessions = _sessions(self._settings)
        found = asdict(agents.agents(self._llm, sessions, self._settings))
        print(_sentence(found, self._texts), flush=True)
        return found


def _sessions(settings: TurnsSettings) -> list[Session]:
    """Those of the sample that fit, with at least two requests each."""
    room = settings.longest - settings.new
    fitting = [each.shrunk(settings.shrink, room, settings.requests) for each in load_sessions()]
    found = [each for each in fitting if len(each.requests) > 1][: settings.sessions]
    if not found:
        more = f"a longer --prompt, more --shrink, or --scenarios without {AGENTS}"
        raise ConfigError(f"no recorded session fits into {room} tokens: ask for {more}")
    return found


TITLES = {
    "turns": "one conversation, time to first token with the cache and without",
    "edit": "a message changed in a prompt that is cached",
    "fan-out": "requests at once over one prefix",
    AGENTS: "recorded sessions of a coding agent, at once",
    "cold": "requests at once that share nothing",
    RESTART: "the engine started again, with the cache in a folder",
}


def _sentence(found: dict[str, object], texts: bool) -> str:
    """A number and its name, all of them."""
    left_out = () if texts else ("same_texts", "texts")
    shown = {key.replace("_", " "): value for key, value in found.items() if value is not None and key not in left_out}
    return ", ".join(f"{key} {_number(value)}" for key, value in shown.items())


def _number(value: object) -> str:
    if isinstance(value, dict):
        return "/".join(f"{each:g}" for each in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value)
