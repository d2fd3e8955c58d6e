"""Bodies that are nearly right: those of known clients, mutated, and hostile ones of any size. The same for a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from recorded_bodies import Recorded, recorded

LIMIT = 4 << 20  # bytes; what `--max-body` is unless told
LIMITS = {  # by the path's beginning: where a body says how long the answer may be
    "/v1/chat": ("max_tokens",),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/completion": ("n_predict",),
    "/api/": ("options", "num_predict"),
}
JSON_TYPE = {"content-type": "application/json"}
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, 1e-320, "", " ", "\0",
    "\ud800", "a\u0301\U0001f469\u200d", "x" * 600, "x" * 100_000, [], [[]], [None], {}, {"": {}}, {"type": "image"},
    {"type": []}, [{}] * 1000, list(range(5000)), {str(i): i for i in range(2000)},
]  # fmt: skip
RAW_VALUES = [
    "NaN",
    "-Infinity",
    "1e99999",
    "01",
    "'x'",
    "[" * 200 + "]" * 200,
    "[" * 100_000,
    '{"a":' * 60 + "1" + "}" * 60,
]
CONTENT_TYPES = ["", "text/plain", "application/json; charset=utf-16", "application/x-www-form-urlencoded", "a" * 5000]
MARK = "\u2620raw\u2620"  # stands for a raw value until the JSON is text


@dataclass(frozen=True)
class Fuzzed:
    path: str
    data: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_TYPE))


def fuzzed(count: int, seed: int, num_large: int) -> Iterator[Fuzzed]:
    """``num_large`` of them take up to the limit of a body each."""
    rng, sources = random.Random(seed), recorded()
    large = list(large_bodies())
    every = max(1, count // num_large) if num_large else count + 1
    for i in range(count):
        if i % every == every - 1:
            yield large[i // every % len(large)]
        else:
            yield _mutated(rng.choice(sources), rng)


def large_bodies() -> Iterator[Fuzzed]:
    """Faults, fields, parts and letters in great numbers, on each path."""
    items = {"faults": "{}", "numbers": "1", "texts": '""', "lists": "[]", "parts": '{"type":"text","text":"a"}'}
    for item in items.values():
        many = "[" + ",".join([item] * ((LIMIT - 300) // (len(item) + 1))) + "]"
        user = '{"messages":[{"role":"user","content":' + many + '}],"max_tokens":1}'
        yield from (Fuzzed(path, user.encode()) for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"))
        messages = '{"messages":' + many + ',"max_tokens":1}'
        yield from (Fuzzed(path, messages.encode()) for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"))
        yield Fuzzed("/v1/completions", ('{"prompt":' + many + ',"max_tokens":1}').encode())
        yield Fuzzed("/v1/responses", ('{"input":' + many + ',"max_output_tokens":1}').encode())
        yield Fuzzed("/detokenize", ('{"tokens":' + many + "}").encode())
        hello = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,'
        for name in ("tools", "stop", "x"):
            yield Fuzzed("/v1/chat/completions", (hello + f'"{name}":' + many + "}").encode())
        yield Fuzzed("/v1/chat/completions", (hello + '"response_format":{"type":' + many + "}}").encode())
    fields = ",".join(f'"{i}":0' for i in range(410_000))
    yield Fuzzed("/v1/chat/completions", (hello + fields + "}").encode())
    yield Fuzzed("/v1/chat/completions", (hello + '"metadata":{' + fields + "}}").encode())
    yield Fuzzed("/v1/chat/completions", (hello + '"max_tokens":1,' * 200_000 + '"n":1}').encode())
    for letter in ("a", "\\u0000", "\\ud83d", " ", "\u00e9"):
        text = letter * ((LIMIT - 300) // len(letter.encode()))
        yield Fuzzed("/v1/completions", f'{{"prompt":"{text}","max_tokens":1}}'.encode())
        yield Fuzzed("/tokenize", f'{{"prompt":"{text}"}}'.encode())
    yield Fuzzed("/v1/chat/completions", b" " * (LIMIT - 1) + b"{")
    yield Fuzzed("/v1/chat/completions", b"[" * (LIMIT - 1))
    yield Fuzzed("/v1/chat/completions", b'{"a":' * (LIMIT // 5 - 1))
    yield Fuzzed("/v1/chat/completions", b"\xff" * (LIMIT - 1))
    yield Fuzzed("/v1/chat/completions", b"x" * (LIMIT + 1))


def _mutated(source: Recorded, rng: random.Random) -> Fuzzed:
    body = limited(source.path, deepcopy(source.body))
    raw = None
    for _ in range(rng.choice((1, 1, 2, 4))):
        how = rng.choice(STRUCTURAL)
        raw = how(body, rng) or raw
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    if raw is not None:
        text = text.replace(json.dumps(MARK), raw).replace(f'"{MARK}"', raw)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        data = rng.choice(BYTEWISE)(data, rng)
    headers = dict(JSON_TYPE)
    if rng.random() < 0.05:
        headers["content-type"] = rng.choice(CONTENT_TYPES)
    return Fuzzed(source.path, data[:LIMIT], headers)


def limited(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Answers of a few tokens, so that most of the time goes to the bodies."""
    for start, (*holders, name) in LIMITS.items():
        if path.startswith(start):
            holder = body.setdefault(holders[0], {}) if holders else body
            if isinstance(holder, dict):
                holder.pop("max_completion_tokens", None)
                holder[name] = 2
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a body that holds a value: a dict and its key, a list and its index."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def _place(body: dict[str, Any], rng: random.Random) -> tuple[Any, Any]:
    found = list(_places(body))
    top = [(holder, key) for holder, key in found if holder is body]
    return rng.choice(top if rng.random() < 0.5 and top else found or [(body, "x")])


def _replace(body: dict[str, Any], rng: random.Random) -> None:
    holder, key = _place(body, rng)
    holder[key] = deepcopy(rng.choice(ODD_VALUES))


def _replace_raw(body: dict[str, Any], rng: random.Random) -> str:
    holder, key = _place(body, rng)
    holder[key] = MARK
    return rng.choice(RAW_VALUES)


def _drop(body: dict[str, Any], rng: random.Random) -> None:
    holder, key = _place(body, rng)
    if isinstance(holder, list) or key in holder:
        del holder[key]


def _repeat(body: dict[str, Any], rng: random.Random) -> None:
    lists = [holder[key] for holder, key in _places(body) if isinstance(holder[key], list) and holder[key]]
    if lists:
        chosen = rng.choice(lists)
        chosen += [rng.choice(chosen)] * rng.choice((1, 30, 300))


def _swap(body: dict[str, Any], rng: random.Random) -> None:
    """A value of one place at another: right types in wrong places."""
    (one, a), (other, b) = _place(body, rng), _place(body, rng)
    if isinstance(other, list) or b in other:
        one[a] = deepcopy(other[b])


def _rename(body: dict[str, Any], rng: random.Random) -> None:
    holder, key = _place(body, rng)
    if isinstance(holder, dict) and key in holder:
        holder[rng.choice((key.upper(), key + " ", key + "\0", "__class__", "x" * 10_000))] = holder.pop(key)


def _add(body: dict[str, Any], rng: random.Random) -> None:
    holder, _ = _place(body, rng)
    if isinstance(holder, dict):
        holder[f"unknown_{rng.randrange(100)}"] = deepcopy(rng.choice(ODD_VALUES))


STRUCTURAL: list[Callable[[dict[str, Any], random.Random], str | None]] = [
    _replace, _replace, _replace, _replace_raw, _drop, _repeat, _swap, _rename, _add,
]  # fmt: skip


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"\xc3", b"\r\n", b"/**/")) + data[at:]


def _twice(data: bytes, rng: random.Random) -> bytes:
    """Every key of the outer object a second time, or the whole body again."""
    return b"{" + data.strip()[1:-1] + b"," + data.strip()[1:] if rng.random() < 0.7 else data + data


def _other_encoding(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))


BYTEWISE: list[Callable[[bytes, random.Random], bytes]] = [_flip, _cut, _insert, _twice, _other_encoding]
