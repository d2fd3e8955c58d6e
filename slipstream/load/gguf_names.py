"""What the names of GGUF files say: which are models, and which are parts of one. Reads no file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath, PurePosixPath

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")  # of a split file, without the ending
NO_MODELS = ("mtp-", "mmproj", "imatrix", "dflash-", "dspark-", "eagle3-")  # how other GGUF files' names begin


def whole_stem(path: PurePath) -> str:
    """A file's name without its ending and the number of a part."""
    part = PART.fullmatch(path.stem)
    return part["stem"] if part is not None else path.stem


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The model files among those, by the name of each without its ending: a list of one, or of all its parts."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() == ".gguf" and not path.name.lower().startswith(NO_MODELS):
            models.setdefault(whole_stem(path), []).append(name)
    return models
