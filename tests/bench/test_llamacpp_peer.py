"""llama.cpp beside us: only where its package is installed, but its absence is an error message everywhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slipstream.bench.harness.cpu_share import cpu_seconds
from slipstream.bench.harness.llamacpp_peer import LlamaCppPeer, open_peer
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.errors import ConfigError
from slipstream.load import default_model_path, open_model

TRANSLATE = [{"role": "user", "content": MTP_BENCH_PROMPTS["translation"]}]


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


def test_a_damaged_file(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and no more")
    with pytest.raises(ConfigError, match="cannot open"), open_peer(broken, 1, True):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads CPU time from /proc")
def test_it_answers_in_silence_and_then_rests(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    prompt = open_model().tokenizer.chat(TRANSLATE)
    with open_peer(default_model_path(), 2, True, 256) as peer:
        assert isinstance(peer, LlamaCppPeer)
        answers = peer.generate([prompt] * 2, 64) + peer.generate([prompt], 5)
        busy = cpu_seconds(peer.process.pid)
        time.sleep(0.5)
        assert cpu_seconds(peer.process.pid) - busy < 0.1, "its threads spin while others are measured"
    assert peer.process.returncode == 0
    lengths = [answer.num_tokens for answer in answers]
    assert 10 < lengths[0] == lengths[1] < 64, "an answer ends at the model's end token"
    assert lengths[2] == 5
    assert all(answer.decode_seconds > 0 for answer in answers)
    assert capfd.readouterr() == ("", "")
