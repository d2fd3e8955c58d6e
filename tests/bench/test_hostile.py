"""`slipstream bench hostile` on the default model: every harmful request ends, and the streams go on."""

from __future__ import annotations

import json

import pytest

from slipstream.bench.kinds import hostile
from slipstream.cli import main


def test_every_harmful_request_ends(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a million repeats", "endless ambiguity", "a schema that needs itself"]
    some = {name: hostile.harmful(0)[name] for name in names}
    monkeypatch.setattr(hostile, "harmful", lambda salt: some)
    asked = ["--streams", "2", "--seconds", "1", "--repeats", "1"]
    assert main(["bench", "hostile", "--draft", "off", "--max-context", "8192", *asked]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    [turn] = report["rounds"]
    assert [ending["name"] for ending in turn["endings"]] == names
    assert all(ending["how"].startswith(("refused, 400", "answered")) for ending in turn["endings"])
    assert turn["beside"]["tok_s"] > 0
    assert turn["beside_plain"]["tok_s"] > 0
