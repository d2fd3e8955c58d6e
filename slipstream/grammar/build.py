"""A Source -> a grammar text for llguidance, tried once; or the reason against it and its position in the schema."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from slipstream.grammar.specs import Source, children
from slipstream.grammar.vocabulary import LIMITS

# Models that go astray repeat white space for ever; no indentation needs more.
_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,32}"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
TOO_COMPLEX = "too complex"
PATTERN_FAULT = "regex parse error"
PATTERN_BEGINS = "(in regex): "  # in llguidance's other messages about a pattern
TRIAL_TOKENS = 32
TRIAL_SECONDS = 0.64  # processor time for the masks of these tokens: thousands of times the usual


class Unusable(Exception):
    """The reason against a grammar, and the path to the fault in a schema."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def grammar_text(source: Source) -> str:
    match source.kind:
        case "json":
            return _from_schema(json.loads(source.text))
        case "lenient_json":
            return _from_schema(json.loads(source.text), lenient=True)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(source.text)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(source.text)
        case "gbnf":
            return llguidance.LLMatcher.grammar_from_lark(_from_gbnf(source.text))


def _from_schema(schema: Any, lenient: bool = False) -> str:
    options: Any = {**_JSON, **_LENIENT} if lenient else _JSON
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare ones, and RecursionError
        raise Unusable(str(error) or type(error).__name__) from error


def compiled(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise Unusable(_plain(matcher.get_error()))
    return matcher


def build(tokenizer: llguidance.LLTokenizer, source: Source) -> str:
    """The grammar text, once it has been compiled and tried."""
    grammar = grammar_text(source)
    try:
        matcher = compiled(tokenizer, grammar)
    except Unusable as error:
        if source.kind == "regex":  # read inside a grammar that llguidance makes: its lines are not the client's
            raise Unusable(_about_pattern(str(error))) from error
        if source.kind not in ("json", "lenient_json"):
            raise
        raise Unusable(str(error), _fault_path(tokenizer, source, str(error))) from error
    _try(matcher, tokenizer.vocab_size)
    return grammar


def _about_pattern(message: str) -> str:
    _, found, after = message.partition(PATTERN_FAULT)
    return found + after if found else message.partition(PATTERN_BEGINS)[2] or message


def _try(matcher: llguidance.LLMatcher, vocab_size: int) -> None:
    """Walk along random allowed tokens: a grammar with slow masks is found early."""
    chance = random.Random(0)
    began = time.process_time()
    for i in range(TRIAL_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << vocab_size - 1) - 1)  # without END
        if matcher.is_error():
            reason = _plain(matcher.get_error())
            raise Unusable(reason if i or reason.startswith(TOO_COMPLEX) else "no text fits it")
        if time.process_time() - began > TRIAL_SECONDS:
            raise Unusable(f"{TOO_COMPLEX}: what may follow takes too long to compute")
        if not mask:
            return
        first = chance.randrange(mask.bit_length())
        rest = mask >> first  # the top bit is set, so something is left
        matcher.try_consume_tokens([first + (rest & -rest).bit_length() - 1])


def _fault_path(tokenizer: llguidance.LLTokenizer, source: Source, message: str) -> str:
    """The path to the smallest part of the schema that fails with the same message."""
    node: Any = json.loads(source.text)
    shared = {key: node[key] for key in ("$defs", "definitions") if isinstance(node, dict) and key in node}
    path = ""
    while True:
        for step, child in children(node):
            if _fails(tokenizer, child, shared, source.kind == "lenient_json", message):
                node, path = child, path + step
                break
        else:
            return path


def _fails(tokenizer: llguidance.LLTokenizer, node: Any, shared: dict[str, Any], lenient: bool, message: str) -> bool:
    if isinstance(node, list) or not (
        node.keys() & {"type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf", "not"}
    ):
        return any(_fails(tokenizer, child, shared, lenient, message) for _, child in children(node))
    try:
        compiled(tokenizer, _from_schema({**node, **shared}, lenient))
    except Unusable as error:
        return str(error) == message
    return False


def _plain(message: str) -> str:
    """llguidance's message in one line, without its traces and without the grammar's text, which it indents; a limit
    that was met means: too complex."""
    lines = message.partition("<non-verbose/>")[0].partition("<backtrace>")[0].strip().splitlines()
    short = " ".join(line.removeprefix("error: ").rstrip() for line in lines if line[:1].strip("~ "))
    return f"{TOO_COMPLEX}: {short}" if "too many" in short else short
