"""Constraints for tiny models: a tokenizer whose 97 tokens are the printable characters, an end and a spare one."""

from __future__ import annotations

import string
from functools import lru_cache

import tokenizers

from slipstream.grammar import Choice, Gbnf, GrammarCompiler, JsonSchema, Regex
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.token_bytes import BYTE_OF
from slipstream.load.tokenizer.tokenizer import Tokenizer
from slipstream.sampling import AfterThinking, AllOf, Constraint, ThinkingBudget
from slipstream.sampling.constraints import BadWords

CHARACTERS = sorted(character for character, byte in BYTE_OF.items() if 32 <= byte < 127)
END = len(CHARACTERS)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"enum": ["x", "yy", None]}},
    "required": ["b"],
    "additionalProperties": False,
}
VOWELS = tuple((CHARACTERS.index(letter),) for letter in "aeiou")
NAMES = ["schema", "regex", "choice", "gbnf", "thinking", "budget", "everything", "dead end"]


def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(CHARACTERS)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<end>", "<spare>"])
    return Tokenizer(backend, "byte_level", ChatTemplate({}, {}), (END,))


@lru_cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


@lru_cache
def constraint(name: str | None) -> Constraint | None:
    compile = _compiler().compile
    marker = (CHARACTERS.index("#"),)
    match name:
        case "schema":
            return compile(JsonSchema(SCHEMA))
        case "regex":
            return compile(Regex(f"[{string.ascii_letters}]{{3}}(,[0-9]+)*"))
        case "choice":
            return compile(Choice(["yes", "yesterday", "no"]))
        case "gbnf":
            return compile(Gbnf('root ::= ("(" root ")")* [a-z ]'))
        case "thinking":
            return AfterThinking(compile(Choice(["yes", "no"])), marker)
        case "budget":
            return ThinkingBudget(5, (*VOWELS[0], *marker), marker)
        case "everything":
            return AllOf((ThinkingBudget(3, marker), AfterThinking(compile(Regex("[a-z]+")), marker), BadWords(VOWELS)))
        case "dead end":  # the words need a vowel: some outputs cannot go on
            return AllOf((compile(Regex("[bcd]{1,6}[aeiou]")), BadWords(VOWELS)))
    return None
