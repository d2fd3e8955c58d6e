"""`slipstream bench hostile`: what a server's streams feel while others send it grammars made to do harm.

Streams decode on a real server, fresh ones each time: undisturbed; while a client sends every harmful request over
HTTP, one after the other; and beside plain requests in place of those that were answered, at the same times and as
long, for an answer shares the batch with the streams, harmful or not. Reports how each harmful request ended, what pace
the streams kept beside either, and the longest that one of them waited for its next token.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from slipstream.bench.harness.local_server import served
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.bench.harness.report import check_writable, title, write_report
from slipstream.bench.harness.traffic import StreamLog, StreamRequest, abort, submit
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import Turns
from slipstream.errors import ConfigError
from slipstream.sampling import SamplingParams
from slipstream.server.service.model_holder import LoadedModel

QUESTION = [{"role": "user", "content": "Say something."}]
MAX_TOKENS = 48  # of an answer to a harmful request that is not refused
CLIENT_SECONDS = 300.0


def _nested(depth: int, around: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = around(schema)
    return schema


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _chain(salt: int) -> str:
    return "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} "a"' for i in range(2000)), f'r2000 ::= "b{salt}"'])


def harmful(salt: int) -> dict[str, dict[str, Any]]:
    """Fields of requests, by what is harmful in them. Others for every salt: a server remembers what it refused."""
    itself = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "title": str(salt)}}}
    return {
        "a text of 300,000 letters": _schema({"enum": [str(salt) + "x" * 300_000]}),
        "20,000 alternatives": _schema({"enum": list(range(salt, salt + 20_000))}),
        "a schema of 2^12 leaves": _schema(
            {"title": str(salt), **_nested(12, lambda inner: {"anyOf": [inner, inner]})}
        ),
        "a million repeats": {"guided_regex": f"{salt}a{{1000000}}"},
        "repeats of repeats": {"guided_regex": f"{salt}(a{{9000}}){{9000}}"},
        "repeats of ranges": {"guided_regex": f"{salt}((a{{1,100}}){{1,100}}){{1,100}}"},
        "50,000 parentheses": {"guided_regex": str(salt) + "(" * 50_000 + "a" + ")" * 50_000},
        "a chain of 2,000 rules": {"guided_grammar": _chain(salt)},
        "endless ambiguity": {"guided_grammar": f'start: x\nx: x x x | "" | "a" | "b{salt}"'},
        "a schema that needs itself": _schema(itself),
    }


@dataclass(frozen=True, slots=True)
class HostileSettings:
    streams: int = 4
    seconds: float = 20.0  # of each stretch; with harmful requests at least
    repeats: int = 3

    def __post_init__(self) -> None:
        if min(self.streams, self.repeats) < 1 or self.seconds <= 0.0:
            raise ConfigError("streams, seconds and repeats must be above 0")


@dataclass(frozen=True, slots=True)
class StreamPace:
    """Of all streams over one stretch of time."""

    tok_s: float
    longest_ms: float  # that a stream waited for its next token

    @staticmethod
    def of(logs: Sequence[StreamLog], after: float, until: float) -> StreamPace:
        tokens = sum(log.tokens_within(after, until) for log in logs)
        gaps = [gap for log in logs for gap in log.gaps(after, until)]
        return StreamPace(round(tokens / (until - after), 1), round(1e3 * max(gaps, default=until - after), 1))


@dataclass(frozen=True, slots=True)
class Ending:
    """Of one harmful request."""

    name: str
    how: str
    began: float  # seconds after the first of them
    seconds: float
    num_tokens: int  # that it was answered with


@dataclass(frozen=True, slots=True)
class HostileRound:
    alone: StreamPace
    beside: StreamPace
    beside_plain: StreamPace
    endings: list[Ending]

    @property
    def kept(self) -> float:
        return self.beside.tok_s / self.alone.tok_s

    @property
    def kept_beside_plain(self) -> float:
        return self.beside_plain.tok_s / self.alone.tok_s


def hostile(options: ModelOptions, settings: HostileSettings, to: ReportOptions) -> int:
    check_writable(to)
    # One slot more than the streams take: harmful answers run beside them, not after them.
    with served(replace(options, max_streams=settings.streams + 1)) as (port, loaded):
        print(title(options, f"{settings.streams} streams beside harmful grammars"))
        with Turns("stretches", 3 * settings.repeats) as progress:
            rounds = [_round(port, loaded, settings, salt, progress) for salt in range(settings.repeats)]
    for ending in rounds[-1].endings:
        print(f"{ending.name:28} {ending.seconds:6.2f} s  {ending.how}")
    for each in rounds:
        print(
            f"tok/s alone {each.alone.tok_s:7.1f}, beside harmful {each.beside.tok_s:7.1f} ({each.kept:.3f}), "
            f"beside plain {each.beside_plain.tok_s:7.1f} ({each.kept_beside_plain:.3f}); "
            f"longest wait for a token {each.alone.longest_ms:.0f} and {each.beside.longest_ms:.0f} ms"
        )
    kept = median(each.kept for each in rounds)
    plain = median(each.kept_beside_plain for each in rounds)
    print(f"kept, median of {len(rounds)}: {kept:.3f} beside harmful requests, {plain:.3f} beside plain ones")
    summary = {
        "kept": round(kept, 3),
        "kept_beside_plain": round(plain, 3),
        "rounds": [asdict(each) for each in rounds],
    }
    write_report("hostile", options, to, {"settings": asdict(settings), **summary})
    return 0


def _round(port: int, loaded: LoadedModel, settings: HostileSettings, salt: int, progress: Turns) -> HostileRound:
    endings: list[Ending] = []
    alone = _beside(loaded, settings, lambda: None, progress)
    harmed = _beside(loaded, settings, lambda: endings.extend(_harm(port, salt)), progress)
    replaced = _beside(loaded, settings, lambda: _send_plain_instead(port, endings), progress)
    return HostileRound(alone, harmed, replaced, endings)


def _beside(loaded: LoadedModel, settings: HostileSettings, happens: Callable[[], None], progress: Turns) -> StreamPace:
    """The pace of fresh streams while it happens, and until their time is over."""
    room = loaded.engine.info.max_context
    texts = list(MTP_BENCH_PROMPTS.values())
    chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(settings.streams)]
    prompts = [loaded.tokenizer.chat(chat) for chat in chats]
    logs = [submit(loaded.engine, StreamRequest(prompt, _endless(room - len(prompt)))) for prompt in prompts]
    try:
        for log in logs:
            log.wait_begun()
        began = time.perf_counter()
        happens()
        time.sleep(max(0.0, began + settings.seconds - time.perf_counter()))
        ended = time.perf_counter()
    finally:
        abort(loaded.engine, logs)
    progress.advance()
    if any(len(log.tokens) + log.num_prompt >= room for log in logs):
        raise ConfigError("the streams reached the end of their context: give a larger --max-context or fewer seconds")
    return StreamPace.of(logs, began, ended)


def _harm(port: int, salt: int) -> list[Ending]:
    began = time.perf_counter()
    return [_send(port, name, fields, began) for name, fields in harmful(salt).items()]


def _send_plain_instead(port: int, endings: Sequence[Ending]) -> None:
    """Plain requests for those that were answered, at their times and as long."""
    began = time.perf_counter()
    for ending in endings:
        if ending.num_tokens:
            time.sleep(max(0.0, began + ending.began - time.perf_counter()))
            _send(port, "plain", {"max_tokens": ending.num_tokens, "ignore_eos": True}, began)


def _endless(num_tokens: int) -> SamplingParams:
    """As long as the context lasts."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


def _send(port: int, name: str, fields: dict[str, Any], first: float) -> Ending:
    body = json.dumps({"messages": QUESTION, "max_tokens": MAX_TOKENS, **fields})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLIENT_SECONDS)
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except TimeoutError:
        raise ConfigError(f"no answer in {CLIENT_SECONDS:g} s: give more --kv-memory or fewer seconds") from None
    finally:
        connection.close()
    num_tokens = answer["usage"]["completion_tokens"] if response.status == 200 else 0
    took = time.perf_counter() - began
    return Ending(name, _how(response.status, answer), round(began - first, 2), round(took, 2), num_tokens)


def _how(status: int, answer: dict[str, Any]) -> str:
    if status != 200:
        return f"refused, {status}: {answer['error']['message'][:80]}"
    [choice] = answer["choices"]
    fault = f", {choice['error'][:60]}" if choice.get("error") else ""
    return f"answered, {choice['finish_reason']}{fault}"
