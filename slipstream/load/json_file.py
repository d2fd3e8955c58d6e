"""JSON files on disk: an object, or an error that names the file. Knows no model format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, LoadError
from slipstream.load.mapped_file import refuse_pointer


def read_json(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from error
    refuse_pointer(path, raw)
    return parse_json(raw, str(path))


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{where} should be JSON, but it does not parse: {error}.") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{where} should hold a JSON object, it holds a {type(value).__name__}.")
    return value
