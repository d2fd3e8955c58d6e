"""What known clients send, in bodies/*.json: made from their public sources, each file says from which.

`base` are the fields that most bodies of a client share; a body adds to them, and may be `without` some. `prompt_has`:
texts that must reach the model. `refused`: a word of the 400 that is the right answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "bodies"


@dataclass(frozen=True)
class Recorded:
    client: str
    name: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    refused: str | None = None
    prompt_has: tuple[str, ...] = ()
    json: bool = False  # it asks for an object with a title
    no_text: bool = False  # it asks for nothing
    whole_only: bool = False  # it is never streamed

    def __str__(self) -> str:
        return f"{self.client}: {self.name}"


def recorded() -> list[Recorded]:
    return [each for path in sorted(FOLDER.glob("*.json")) for each in _read(path)]


def _read(path: Path) -> Iterable[Recorded]:
    data = json.loads(path.read_text())
    for each in data["bodies"]:
        base = data["base"] if each.pop("from_base", False) else {}
        without = each.pop("without", ())
        body = {key: value for key, value in {**base, **each.pop("body")}.items() if key not in without}
        prompt_has = tuple(each.pop("prompt_has", ()))
        yield Recorded(data["client"], body=body, headers=data.get("headers", {}), prompt_has=prompt_has, **each)
