"""Files made to do harm, as the commands meet them: one sentence, in bounded time, with nothing a terminal obeys."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from real_server import WAIT, RealServer

from slipstream.cli import main
from slipstream.errors import CorruptFile, RequestError, UnknownModel
from slipstream.load import open_model, open_tokenizer
from slipstream.load.tokenizer import chat_template

RED = "\x1b[31m"
PANICS = {
    "at load": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "in the first encode": {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}},
    "without its unknown token": {
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"a": 0},
        }
    },
}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
COMMANDS = [["plan"], ["generate", "--prompt", "x"], ["serve", "--port", "0"]]


def write_tokenizer(folder: Path, **changes: Any) -> None:
    """A byte-level one, with some parts replaced."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(sorted(byte_level.alphabet()))}, [])
    )
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str()) | changes))


def said(capfd: pytest.CaptureFixture[str]) -> str:
    """The last line on standard error: a panicking library prints lines of its own."""
    return capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", PANICS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.each_value
def test_a_tokenizer_that_panics(
    tmp_path: Path, build: Any, capfd: pytest.CaptureFixture[str], name: str, command: list[str]
) -> None:
    folder = build.llama_folder(tmp_path / "m", vocab_size=40)
    write_tokenizer(folder, **PANICS[name])
    assert main([*command, str(folder)]) == 1
    line = said(capfd)
    assert line.startswith("slipstream: ")
    assert "tokenizer.json cannot be used as a tokenizer" in line


def test_a_panic_at_a_request_is_the_requests(tmp_path: Path) -> None:
    """A text that the sample at load did not show."""
    write_tokenizer(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_backend", open_unchecked(tmp_path, **PANICS["in the first encode"]))
        with pytest.raises(RequestError, match="tokenizer failed on this text"):
            tokenizer.encode("x")


def open_unchecked(folder: Path, **changes: Any) -> tokenizers.Tokenizer:
    write_tokenizer(folder, **changes)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)


@pytest.mark.usefixtures("hurried")
def test_a_template_that_hangs(tmp_path: Path, build: Any, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(build.gguf(tmp_path / "x.gguf", metadata={"tokenizer.chat_template": LOOPS}))
    assert main(["plan", path]) == 0
    assert "chat: a plain question fails: The model's chat template did not finish" in capfd.readouterr().out
    assert main(["generate", path, "--prompt", "hello", "--max-streams", "1", "--kv-memory", "1M"]) == 1
    assert said(capfd) == "slipstream: The model's chat template did not finish within 1 seconds."


def test_a_server_whose_template_hangs(tmp_path: Path, build: Any) -> None:
    """Told at the start; completions work, chats do not wait, and SIGTERM is obeyed."""
    path = str(build.gguf(tmp_path / "x.gguf", metadata={"tokenizer.chat_template": LOOPS}))
    with RealServer(path, "--max-streams", "2", "--kv-memory", "1M", "--drain", "2") as server:
        assert any(line.startswith("chat    a plain question fails: The model's chat") for line in server.output)
        assert httpx.get(f"{server.url}/ready", timeout=WAIT).status_code == 200
        refused = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
        assert refused.status_code == 400
        assert "did not finish within 5 seconds" in refused.json()["error"]["message"]
        assert server.post("/v1/completions", prompt="hello", max_tokens=2).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_model_without_a_template(tmp_path: Path, build: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(build.gguf(tmp_path / "x.gguf"))]) == 0
    assert "chat: a plain question fails: the model has no chat template" in capfd.readouterr().out


@pytest.mark.parametrize("template", ["{% if %}", f"{{{{ raise_exception('no{RED}') }}}}"])
def test_a_broken_template_is_told_by_the_plan(
    tmp_path: Path, build: Any, capfd: pytest.CaptureFixture[str], template: str
) -> None:
    path = str(build.gguf(tmp_path / "x.gguf", metadata={"tokenizer.chat_template": template}))
    assert main(["plan", path]) == 0
    shown = capfd.readouterr().out
    assert "chat: a plain question fails: The model's chat template" in shown
    assert "\x1b" not in shown
    assert main(["plan", "--json", path]) == 0
    assert json.loads(capfd.readouterr().out)["chat_fault"].startswith("The model's chat template")


@pytest.mark.parametrize("dtype", ["I64", f"I64{RED}"])
def test_tensors_that_cannot_be_read_are_found_by_the_plan(
    tmp_path: Path, build: Any, capfd: pytest.CaptureFixture[str], dtype: str
) -> None:
    folder = build.llama_folder(tmp_path / "m")
    tensors = {name: ("F32", array) for name, array in build.llama_tensors().items()}
    tensors["model.norm.weight"] = (dtype, np.zeros(64, np.int64))
    (folder / "model.safetensors").write_bytes(build.safetensors_bytes(tensors))
    with pytest.raises(UnknownModel, match=r"'model\.norm\.weight' is stored as I64"):
        open_model(str(folder))
    assert main(["plan", str(folder)]) == 1
    assert "\x1b" not in said(capfd)


def test_names_of_files_are_shown_escaped(tmp_path: Path, build: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(build.gguf(tmp_path / f"a{RED}\u202eb.gguf"))]) == 0
    assert "a\\x1b[31m\\u202eb (llama)" in capfd.readouterr().out


def test_a_file_that_is_no_tokenizer_is_still_said_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(CorruptFile, match=r"tokenizer\.json cannot be used"):
        open_tokenizer(tmp_path)
