"""Tokenizers from GGUF metadata and from folders, against golden ids and against the libraries' own."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.errors import CorruptFile, LoadError, RequestError, UnknownModel
from slipstream.load import open_tokenizer
from slipstream.load.gguf.vocab import PRE_TOKENIZERS, tokenizer_from_gguf
from slipstream.load.tokenizer.token_bytes import byte_characters

TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces\n\n\tand\r\ntabs   ",
    "naïve café — “quotes” … 中文字符 日本語 한국어",
    "👩‍👩‍👧‍👦 🎉 e\u0301 क्षि",
    "def f(x):\n    return x**2  # 3.14\n",
    "",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog"] * 20


@pytest.fixture(scope="session")
def default_tokenizer(default_gguf):
    return open_tokenizer(default_gguf, (2,))


def test_golden_prompts(default_tokenizer, reference):
    assert len(reference) == 6
    for case in reference:
        ids = default_tokenizer.chat([{"role": "user", "content": case["prompt"]}])
        assert ids == case["prompt_ids"]


def test_default_vocabulary(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.eos_token_ids == (2,)
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.encode("<|im_end|>") == [2]
    assert default_tokenizer.encode("12") == default_tokenizer.encode("1") + default_tokenizer.encode("2")


@pytest.mark.parametrize("text", TEXTS)
def test_default_round_trip(default_tokenizer, text):
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


def test_special_tokens_as_text(default_tokenizer):
    ids = default_tokenizer.encode("a<|im_end|>", allow_special=False)
    assert 2 not in ids
    assert default_tokenizer.decode(ids) == "a<|im_end|>"
    special = default_tokenizer.encode("a<|im_end|>")
    assert special[-1] == 2
    assert default_tokenizer.decode(special) == "a"
    assert default_tokenizer.decode(special, skip_special=False) == "a<|im_end|>"


def test_ids_outside_the_vocabulary_are_nothing(default_tokenizer):
    hello = default_tokenizer.encode("hello")
    assert default_tokenizer.decode([49152, *hello, 10**12, -1]) == "hello"


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff", b"bytes", None])
def test_what_is_not_text(default_tokenizer, text):
    with pytest.raises(RequestError, match=r"surrogate|should be text"):
        default_tokenizer.encode(text)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_decode_is_that_of_the_library(default_tokenizer, ids):
    backend = default_tokenizer._backend
    backend.decoder = decoders.ByteLevel()
    assert default_tokenizer.decode(ids) == backend.decode(ids)
    assert default_tokenizer.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)


def test_byte_characters_are_those_of_the_library():
    table = byte_characters()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())


def train(cutting_name: str) -> tokenizers.Tokenizer:
    """A small byte-level tokenizer, with the pre-tokenizers of the models' own tokenizer.json files."""
    patterns = {
        "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=cutting_name == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cutting_name not in patterns)
    steps = [byte_level]
    if cutting_name in patterns:
        steps = [pre_tokenizers.Split(tokenizers.Regex(patterns[cutting_name]), "isolated"), byte_level]
    elif cutting_name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    if cutting_name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gguf_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35"])
def test_gguf_vocabulary_equals_tokenizer_json(tmp_path, pre):
    theirs = train(pre)
    theirs.save(str(tmp_path / "tokenizer.json"))
    from_folder = open_tokenizer(tmp_path)
    from_gguf = tokenizer_from_gguf(gguf_metadata(theirs, pre), "x.gguf")
    for text in [*TEXTS, "x<|end|>y", "abc123def4567 don't DON'T"]:
        wanted = theirs.encode(text).ids
        assert from_folder.encode(text) == wanted
        assert from_gguf.encode(text) == wanted
        assert from_gguf.decode(wanted) == from_folder.decode(wanted) == theirs.decode(wanted)


def test_llama3_takes_a_word_that_is_a_token_whole():
    """Also when no merges lead to it."""
    metadata = gguf_metadata(train("llama-bpe"), "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zyx")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert len(tokenizer_from_gguf(metadata, "x.gguf").encode("zyx")) == 1
    assert len(tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}, "x.gguf").encode("zyx")) == 3


def test_cuttings_differ():
    """Each pre-tokenizer name must matter: these texts are split differently by all five."""
    names = ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35"]
    assert len({PRE_TOKENIZERS[name] for name in names}) == 5


def test_bos_is_added_when_the_file_says_so():
    metadata = gguf_metadata(train("gpt-2"), "gpt-2")
    plain = tokenizer_from_gguf(metadata, "x.gguf")
    wanting = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True}, "x.gguf")
    ids = plain.encode("the fox")
    assert plain.encode("the fox", add_special=True) == ids
    assert wanting.encode("the fox", add_special=True) == [0, *ids]
    assert wanting.encode("the fox") == ids


def test_user_defined_tokens_are_text_that_is_matched_whole():
    metadata = gguf_metadata(train("gpt-2"), "gpt-2")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"].append("<tool call>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    ids = tokenizer.encode("a<tool call>b")
    assert ids[1] == count
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<tool call>b"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, UnknownModel, "'klingon'"),
        ({"tokenizer.ggml.model": "bert"}, UnknownModel, "'bert'"),
        ({"tokenizer.ggml.model": None}, LoadError, "does not say"),
        ({"tokenizer.ggml.tokens": None}, CorruptFile, "tokens should be a list"),
        ({"tokenizer.ggml.tokens": [1, 2]}, CorruptFile, "tokens should be a list"),
        ({"tokenizer.ggml.token_type": [1]}, CorruptFile, "1 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, CorruptFile, "'ab'"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, CorruptFile, "'zz zz'"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, CorruptFile, "beyond the vocabulary"),
    ],
)
def test_broken_vocabularies(changes, error, says):
    with pytest.raises(error, match=says):
        tokenizer_from_gguf(gguf_metadata(train("gpt-2"), "gpt-2") | changes, "x.gguf")


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
WORDS = {
    "▁": -1,
    "h": -2,
    "e": -3,
    "l": -4,
    "o": -5,
    "▁h": -6,
    "el": -7,
    "lo": -8,
    "▁hel": -9,
    "▁hello": -10,
    "he": -11,
}


def sentencepiece_metadata(**changes) -> dict:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*PIECES, *WORDS],
        "tokenizer.ggml.scores": [0.0] * len(PIECES) + [float(score) for score in WORDS.values()],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def test_sentencepiece():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), "x.gguf", (2,))
    names = [*PIECES, *WORDS]
    ids = tokenizer.encode("hello hé</s>")
    assert [names[i] for i in ids] == ["▁hello", "▁h", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(ids) == "hello hé"
    assert tokenizer.encode("hello", add_special=True)[0] == 1
    unspaced = tokenizer_from_gguf(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}), "x.gguf")
    assert [names[i] for i in unspaced.encode("hello")] == ["h", "el", "lo"]
    assert unspaced.decode(unspaced.encode(" hello")) == " hello"


def test_sentencepiece_needs_scores():
    with pytest.raises(CorruptFile, match="scores"):
        tokenizer_from_gguf(sentencepiece_metadata(**{"tokenizer.ggml.scores": [0.5]}), "x.gguf")


def test_sentencepiece_folder(tmp_path):
    """The decoder of Llama 2's tokenizer.json, through our own table of bytes."""
    names = [*PIECES, *WORDS]
    model = models.BPE({name: i for i, name in enumerate(names)}, [("▁", "h")], unk_token="<unk>", byte_fallback=True)
    theirs = tokenizers.Tokenizer(model)
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    theirs.decoder = decoders.Sequence(strip)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = open_tokenizer(tmp_path)
    for text in ("hello hé", " hh", "é"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text == theirs.decode(theirs.encode(text).ids)


def write_folder(folder, **config):
    tokenizer = train("gpt-2")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.enable_truncation(3)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_special_tokens_and_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    write_folder(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, chat_template=template)
    tokenizer = open_tokenizer(tmp_path, (7,))
    bos, eos = tokenizer.encode("<s></s>")
    assert tokenizer.bos_token_id == bos
    assert tokenizer.eos_token_ids == (7, eos)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x</s>"
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == [bos, *tokenizer.encode("x"), eos]
    assert tokenizer.encode("x", add_special=True)[0] == bos
    long = "a long text, for which truncation would be felt"
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_template_file_wins_and_lists_have_a_default(tmp_path):
    write_folder(tmp_path, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.render_chat([]) == "D"
    assert tokenizer.render_chat([], tools=[{"name": "f"}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert open_tokenizer(tmp_path).render_chat([]) == "J"


def test_broken_folders(tmp_path):
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for text in ("{", "[]", '{"decoder": 3}', '{"decoder": {"type": "ByteLevel"}}', '{"model": {"type": "BPE"}}'):
        path.write_text(text)
        with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
            open_tokenizer(tmp_path)
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(path))
    with pytest.raises(UnknownModel, match="only byte-level"):
        open_tokenizer(tmp_path)
    write_folder(tmp_path, chat_template=[{"name": "default"}])
    with pytest.raises(CorruptFile, match="chat_template"):
        open_tokenizer(tmp_path)
