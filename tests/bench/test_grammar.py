"""`slipstream bench grammar`, on the default model: a schema needs a tokenizer."""

from __future__ import annotations

import json

import pytest

from slipstream.bench.kinds.grammar import GrammarSettings
from slipstream.cli import main
from slipstream.errors import ConfigError


def test_grammar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "grammar", "--streams", "3", "--new", "16", "--repeats", "1"]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    [once] = report["rounds"]
    assert 0 < once["mask_ms"] < once["step_ms"]
    assert 0 <= once["constrained_accepted"] <= 1
    assert report["kept"] == pytest.approx(once["beside_tok_s"] / once["alone_tok_s"], abs=1e-3)
    assert "2 of 3 streams under a JSON schema" in "\n".join(shown)


def test_settings_that_measure_nothing() -> None:
    with pytest.raises(ConfigError):
        GrammarSettings(streams=1)
