"""llama.cpp beside us: only where its package is installed, but its absence is told everywhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slipstream.bench.peer import Peer, open_peer
from slipstream.errors import ConfigError
from slipstream.load import default_model_path, open_model

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def test_nobody_wants_it() -> None:
    with open_peer(Path("/no/such/file"), 1, False) as peer:
        assert peer is None


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError, match="pip install xllamacpp"), open_peer(Path("model.gguf"), 1, True):
        pass


def test_a_folder_is_no_gguf(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    with pytest.raises(ConfigError, match="GGUF"), open_peer(tmp_path, 1, True):
        pass


def test_it_answers_in_silence_and_then_rests(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    prompt = open_model().tokenizer.chat(PARIS)
    with open_peer(default_model_path(), 2, True, 256) as peer:
        assert isinstance(peer, Peer)
        answers = peer.generate([prompt] * 3, 24)
        busy = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - busy < 0.1, "its threads spin while others are measured"
    assert [answer.num_tokens for answer in answers] == [8] * 3  # up to the end token, which counts
    assert all(answer.decode_seconds > 0 for answer in answers)
    assert capfd.readouterr() == ("", "")
