"""The vocabulary in a GGUF's metadata -> Tokenizer: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The file only names its pre-tokenizer, in `tokenizer.ggml.pre`; the ones we know are below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from slipstream.errors import CorruptFile, UnknownModel
from slipstream.load.fields import Fields
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.token_bytes import VISIBLE_SPACE
from slipstream.load.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."
FOLDER_INSTEAD = "take the model's Hugging Face folder, whose tokenizer.json holds its tokenizer"


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """How text is split into words before merging. `pattern` None: GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False  # a word that is a token is not merged up


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
_MARKED_SYMBOLS = r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"

GPT2 = PreTokenizerSpec()
SMOLLM = PreTokenizerSpec(single_digits=True)
LLAMA3 = PreTokenizerSpec(_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _SYMBOLS + _SPACES, whole_words_first=True)
QWEN2 = PreTokenizerSpec(_CONTRACTIONS + _WORDS + r"\p{N}" + _SYMBOLS + _SPACES, nfc=True)
QWEN35 = PreTokenizerSpec(_CONTRACTIONS + _MARKED_WORDS + r"\p{N}" + _MARKED_SYMBOLS + _SPACES, nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "gpt2": GPT2,
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,
    "codeshell": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "qwen35": QWEN35,
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The lists of the metadata, checked."""

    where: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    fields = Fields(metadata, where)
    vocabulary = _read_vocabulary(fields)
    model = fields.text(PREFIX + "model")
    if model not in ("gpt2", "llama"):
        raise UnknownModel(
            f"{where}: tokenizer model {model!r} is not supported, only 'gpt2' and 'llama' are: {FOLDER_INSTEAD}."
        )
    spaced = model == "llama" and fields.flag(PREFIX + "add_space_prefix", True)
    backend = _byte_level(fields, vocabulary) if model == "gpt2" else _sentencepiece(fields, vocabulary, spaced)
    _add_special_tokens(backend, vocabulary)
    _add_bos(backend, fields, vocabulary, default=model == "llama")
    return Tokenizer(
        backend,
        "byte_level" if model == "gpt2" else "sentencepiece",
        _template(fields, vocabulary),
        eos_token_ids=eos_token_ids,
        bos_token_id=_token_id(fields, vocabulary, "bos"),
        leading=b" " if spaced else b"",
    )


def _read_vocabulary(fields: Fields) -> GgufVocabulary:
    tokens = _list(fields, "tokens", str)
    if fields.raw(PREFIX + "token_type") is None:
        types = [NORMAL] * len(tokens)
    else:
        types = _list(fields, "token_type", int)
    ids = {token: i for i, token in enumerate(tokens)}
    if len(types) != len(tokens) or not tokens:
        raise CorruptFile(f"{fields.where} has {len(tokens)} tokens but {len(types)} token types.")
    return GgufVocabulary(fields.where, tokens, types, ids)


def _list(fields: Fields, key: str, kind: type) -> list[Any]:
    values = fields.raw(PREFIX + key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CorruptFile(f"{fields.where}: {PREFIX}{key} should be a list of {kind.__name__}.")
    return values


def _byte_level(fields: Fields, vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    name = fields.text(PREFIX + "pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise UnknownModel(
            f"{fields.where}: pre-tokenizer {name!r} is not one of {', '.join(PRE_TOKENIZERS)}: {FOLDER_INSTEAD}."
        )
    spec = PRE_TOKENIZERS[name]
    merges = [_merge(merge, vocabulary) for merge in _list(fields, "merges", str)]
    model = models.BPE(vocabulary.ids, merges, ignore_merges=spec.whole_words_first)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(spec)
    if spec.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _merge(merge: str, vocabulary: GgufVocabulary) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not all(part in vocabulary.ids for part in (left, right, left + right)):
        raise CorruptFile(f"{vocabulary.where}: the merge {merge!r} does not join two tokens into a third.")
    return left, right


def _pre_tokenizer(spec: PreTokenizerSpec) -> pre_tokenizers.PreTokenizer:
    if spec.pattern is not None:
        words = pre_tokenizers.Split(Regex(spec.pattern), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not spec.single_digits:
        return whole
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])


def _sentencepiece(fields: Fields, vocabulary: GgufVocabulary, spaced: bool) -> tokenizers.Tokenizer:
    scores = _list(fields, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CorruptFile(f"{fields.where} has {len(vocabulary.tokens)} tokens but {len(scores)} scores.")
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types) if kind == UNKNOWN), None)
    merges = _merges_from_scores(vocabulary, scores)
    model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(VISIBLE_SPACE)] if spaced else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", VISIBLE_SPACE)])
    return backend


def _merges_from_scores(vocabulary: GgufVocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: every way to make a token, best tokens first."""
    mergeable = {token for token, kind in zip(vocabulary.tokens, vocabulary.types) if kind == NORMAL}
    ranked = sorted(mergeable, key=lambda token: (-scores[vocabulary.ids[token]], vocabulary.ids[token]))
    return [
        (token[:split], token[split:])
        for token in ranked
        for split in range(1, len(token))
        if token[:split] in mergeable and token[split:] in mergeable
    ]


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Control tokens are special; user-defined ones are found in text too, but belong to it."""
    named = [(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types) if token]
    special = [token for token, kind in named if kind == CONTROL]
    plain = [token for token, kind in named if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_bos(backend: tokenizers.Tokenizer, fields: Fields, vocabulary: GgufVocabulary, default: bool) -> None:
    bos = _token_id(fields, vocabulary, "bos")
    if bos is None or not fields.flag(PREFIX + "add_bos_token", default):
        return
    token = vocabulary.tokens[bos]
    template = [token, "$A"]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(token, bos)])


def _token_id(fields: Fields, vocabulary: GgufVocabulary, which: str) -> int | None:
    ids = fields.token_ids(f"{PREFIX}{which}_token_id")
    if ids and ids[0] >= len(vocabulary.tokens):
        raise CorruptFile(f"{fields.where}: the {which} token is {ids[0]}, beyond the vocabulary.")
    return ids[0] if ids else None


def _template(fields: Fields, vocabulary: GgufVocabulary) -> ChatTemplate:
    source = fields.text("tokenizer.chat_template", "")
    ids = {f"{which}_token": _token_id(fields, vocabulary, which) for which in ("bos", "eos")}
    special = {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}
    return ChatTemplate({"default": source} if source else {}, special)
