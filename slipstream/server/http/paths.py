"""The spellings of a path. Clients add or forget the `/v1` of a base URL, and slashes."""

from __future__ import annotations

import re
from collections.abc import Collection

SLASHES = re.compile("/{2,}")
MODELS = "/v1/models/"  # the rest is a model's name


def canonical(path: str, known: Collection[str]) -> str:
    """The known path that is meant, or the path without needless slashes."""
    path = SLASHES.sub("/", path)
    path = path.rstrip("/") or "/"
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    for spelling in (path, f"/v1{path}", path.removeprefix("/v1")):
        if spelling in known or spelling.startswith(MODELS):
            return spelling
    return path
