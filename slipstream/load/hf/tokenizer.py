"""tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face folder -> Tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from slipstream.errors import CorruptFile, LoadError, UnknownModel
from slipstream.load.hf.instead import AGAIN
from slipstream.load.json_file import read_json, read_json_if_there
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.token_bytes import VISIBLE_SPACE, Alphabet
from slipstream.load.tokenizer.tokenizer import Tokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: Path, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
    """`eos_token_ids`: those of the model's configuration; the tokenizer's own one is added to them."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise LoadError(
            f"{folder} has no tokenizer.json, the only tokenizer format we read from a folder: fetch it, too, or take "
            "the model as a GGUF."
        )
    description = read_json(path)
    decoders = _decoders(description, path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    config = {**read_json_if_there(folder / "special_tokens_map.json")}
    config |= read_json_if_there(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos = eos_token_ids if own_eos is None else (*eos_token_ids, own_eos)
    return Tokenizer(
        backend,
        _alphabet(decoders, path),
        ChatTemplate(_templates(folder, config), special),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        leading=b" " if any(_strips_space(decoder) for decoder in decoders) else b"",
    )


def _decoders(description: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The decoder, or the parts of a sequence of them."""
    decoder = description.get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise CorruptFile(f"{path} has a decoder that is not an object: {AGAIN}.")
    return parts


def _alphabet(decoders: list[dict[str, Any]], path: Path) -> Alphabet:
    kinds = [decoder.get("type") for decoder in decoders]
    if "ByteLevel" in kinds:
        return "byte_level"
    if {"ByteFallback", "Metaspace"} & set(kinds) or any(_is_visible_space(decoder) for decoder in decoders):
        return "sentencepiece"
    raise UnknownModel(
        f"{path} decodes with {kinds}, only byte-level and SentencePiece vocabularies can be read: take a model with "
        "one of these."
    )


def _is_visible_space(decoder: dict[str, Any]) -> bool:
    return decoder.get("type") == "Replace" and decoder.get("pattern") == {"String": VISIBLE_SPACE}


def _strips_space(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return decoder.get("type") == "Strip" and decoder.get("content") == " " and bool(decoder.get("start"))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Strings, or objects with the string as their content."""
    found = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8", errors="replace")}
    template = config.get("chat_template") or read_json_if_there(folder / "chat_template.json").get("chat_template")
    if template is None:
        return {}
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    try:
        templates = {str(entry["name"]): entry["template"] for entry in named}
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(source, str) for source in templates.values()):
        raise CorruptFile(
            f"{folder}: chat_template should be a string or a list of objects with name and template: {AGAIN}."
        )
    return templates
