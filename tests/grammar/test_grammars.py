"""Grammars of every kind on every kind of tokenizer: what a stream writes under them is what they describe."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream.errors import ConstraintFault
from slipstream.grammar import Choice, Gbnf, GrammarCompiler, JsonObject, JsonSchema, Lark, Regex, Spec
from slipstream.load.tokenizer.tokenizer import Tokenizer
from slipstream.sampling import Constraint, Matcher
from slipstream.sampling.masks import allows

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["ä", "日本", 3, None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 500}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "kind", "sizes", "inner"],
    "additionalProperties": False,
}
GBNF = 'root ::= item ("," item)*\nitem ::= [a-c]+ "=" [0-9]\n'
LARK = 'start: pair ("," pair)*\npair: KEY "=" /[0-9]/\nKEY: /[a-c]+/\n'
PAIRS = re.compile(r"[a-c]+=[0-9](,[a-c]+=[0-9])*")


@pytest.fixture(scope="module")
def compiler(any_tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(any_tokenizer)
    yield compiler
    compiler.close()


def allowed(mask: bytes | None, vocab_size: int) -> NDArray[np.intp]:
    """The tokens. Often nearly all there are: no list of them."""
    assert mask is not None
    assert len(mask) == (vocab_size + 7) // 8
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))


def write(constraint: Constraint, tokenizer: Tokenizer, seed: int, max_tokens: int = 400) -> str | None:
    """A random text under the constraint, None if it had to be broken off. Ends as soon as it may, often enough."""
    ends = tokenizer.eos_token_ids
    vocab_size = tokenizer.vocab_size + 5  # models often have more rows than their tokenizer has tokens
    matcher, chance, output = constraint.start(vocab_size, ends), random.Random(seed), []
    for _ in range(max_tokens):
        [mask] = matcher.masks([])
        choices = allowed(mask, vocab_size)
        assert choices.size
        assert choices.max() < tokenizer.vocab_size
        token = ends[0] if ends[0] in choices and chance.random() < 0.5 else int(chance.choice(choices))
        if token in ends:
            return b"".join(map(tokenizer.token_bytes, output)).decode()
        matcher.advance([token])
        output.append(token)
    return None


def texts(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: Spec, count: int = 6) -> list[str]:
    constraint = compiler.compile(spec)
    found = [text for seed in range(count) if (text := write(constraint, tokenizer, seed)) is not None]
    assert found, "none came to an end"
    return found


def test_json_schema(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    for text in texts(compiler, any_tokenizer, JsonSchema(SCHEMA)):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_json_object(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    assert all(isinstance(json.loads(text), dict) for text in texts(compiler, any_tokenizer, JsonObject(), 12))


def test_regex(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    for pattern in (r"[0-9]{3}-(ab|cd)+", r"^x[^x]{0,3}x$"):
        assert all(re.fullmatch(pattern, text) for text in texts(compiler, any_tokenizer, Regex(pattern)))


def test_choice(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    options = ["yes", "no", 'a "quoted\\" one\n', "日本 ä", "/x/ | <y>"]
    assert set(texts(compiler, any_tokenizer, Choice(options), 40)) == set(options)


@pytest.mark.parametrize("spec", [Lark(LARK), Gbnf(GBNF)])
def test_grammars(compiler: GrammarCompiler, any_tokenizer: Tokenizer, spec: Spec) -> None:
    assert all(PAIRS.fullmatch(text) for text in texts(compiler, any_tokenizer, spec))


def test_special_tokens_are_no_text(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    special = [token for token in range(any_tokenizer.vocab_size) if any_tokenizer.is_special(token)]
    [mask] = compiler.compile(Regex(r"[\s\S]*")).start(any_tokenizer.vocab_size, ()).masks([])
    ends = set(any_tokenizer.eos_token_ids)
    assert not any(allows(mask, token) for token in special if token not in ends)
    assert all(allows(mask, token) for token in ends)


@pytest.mark.parametrize("spec", [JsonSchema(SCHEMA), Regex("[0-9]{3}-(ab|cd)+"), Gbnf(GBNF), Choice(["yes", "no"])])
def test_masks_behind_drafts_are_those_of_a_matcher_that_went_there(
    compiler: GrammarCompiler, any_tokenizer: Tokenizer, spec: Spec
) -> None:
    constraint, size, ends = compiler.compile(spec), any_tokenizer.vocab_size, any_tokenizer.eos_token_ids
    chance, output, matcher = random.Random(1), [], constraint.start(size, ends)
    for _ in range(12):
        drafts = _drafts(constraint.start(size, ends), output, chance, size)
        masks = matcher.masks(drafts)
        for i, mask in enumerate(masks):
            there = constraint.start(size, ends)
            there.advance([*output, *drafts[:i]])
            assert there.masks([]) == [mask]
            if i < len(drafts) and not allows(mask, drafts[i]):
                break  # tokens after the end do not matter
        committed = drafts[: chance.randrange(len(masks))]
        matcher.advance(committed)
        output += committed


def _drafts(matcher: Matcher, output: list[int], chance: random.Random, size: int) -> list[int]:
    """Three allowed tokens, then perhaps one that is not, or an end."""
    matcher.advance(output)
    drafts: list[int] = []
    for _ in range(3):
        drafts.append(int(chance.choice(allowed(matcher.masks([])[0], size))))
        matcher.advance(drafts[-1:])
    return [*drafts, chance.randrange(size)]


def test_after_a_complete_text_only_what_ends_the_stream(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    size, constraint = any_tokenizer.vocab_size, compiler.compile(Choice(["a"]))
    [token] = allowed(constraint.start(size, ()).masks([])[0], size).tolist()
    for ends, want in (((5, 7), [5, 7]), ((), list(any_tokenizer.eos_token_ids))):
        matcher = constraint.start(size, ends)
        assert [allowed(mask, size).tolist() for mask in matcher.masks([token, want[0], 9])[1:]] == [want] * 3
        matcher.advance([token])
        assert allowed(matcher.masks([3])[0], size).tolist() == want
        matcher.advance([want[0], 8, 9])  # tokens after the end do not matter
        assert allowed(matcher.masks([])[0], size).tolist() == want


def test_what_is_not_allowed_cannot_be_followed(compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Choice(["abc"])).start(any_tokenizer.vocab_size, any_tokenizer.eos_token_ids)
    matcher.advance([0])
    with pytest.raises(ConstraintFault, match="token 0"):
        matcher.masks([])
