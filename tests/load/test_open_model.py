"""open_model: what each kind of name resolves to, and what it says when it cannot."""

from __future__ import annotations

import errno
import subprocess
import sys

import huggingface_hub.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slipstream.load
from slipstream.errors import DownloadError, LoadError
from slipstream.load import open_model
from slipstream.load.hf import hub
from slipstream.load.hf.folder import HfCheckpoint


def test_default_model_drafts(default_gguf):
    opened = open_model(None, None)
    assert opened.path == default_gguf
    assert opened.name == "SmolLM2-135M-Instruct"
    assert opened.spec.num_layers == 30
    assert opened.head is not None
    assert opened.head_reason == ""
    assert opened.tokenizer.eos_token_ids == (2,)
    assert opened.tokenizer is opened.tokenizer


def test_gguf_file(tmp_path, build):
    path = build.gguf(tmp_path / "my-model.gguf")
    opened = open_model(str(path))
    assert (opened.name, opened.path) == ("my-model", path)
    assert opened.head is None
    assert "--mtp" in opened.head_reason
    assert opened.tokenizer.decode(opened.tokenizer.encode("hello<tool>")) == "hello<tool>"


def test_folder(tmp_path, build):
    opened = open_model(str(build.llama_folder(tmp_path / "my-folder")))
    assert opened.name == opened.spec.name == "my-folder"
    assert isinstance(opened.checkpoint, HfCheckpoint)
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        _ = opened.tokenizer


def test_head_in_its_own_file(tmp_path, build, default_gguf):
    target = str(build.gguf(tmp_path / "x.gguf"))
    opened = open_model(target, str(slipstream.load.default_head_path()))
    assert opened.head is None
    assert "fc.weight is [576, 1152], this model needs [64, 128]" in opened.head_reason
    assert open_model(str(default_gguf), str(slipstream.load.default_head_path())).head is not None
    with pytest.raises(LoadError, match="given as the MTP head"):
        open_model(target, str(tmp_path / "nowhere.safetensors"))


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/where", "a/b/c", "model.gguf", "org/model.gguf", "~/nope", "", "a b"]
)
def test_paths_that_do_not_exist(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slipstream.load, "fetch_folder", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(LoadError, match=r"does not exist|is empty"):
        open_model(name)


def test_hub_id(tmp_path, build, monkeypatch):
    folder = build.llama_folder(tmp_path / "snapshots" / "0123abcd")
    asked = []

    def download(hub_id, allow_patterns):
        asked.append((hub_id, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    opened = open_model("some-org/Some-Model.1")
    assert opened.name == opened.spec.name == "some-org/Some-Model.1"
    assert opened.path == folder
    ((hub_id, patterns),) = asked
    assert hub_id == "some-org/Some-Model.1"
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(patterns)
    assert not any("bin" in pattern or pattern == "*" for pattern in patterns)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (huggingface_hub.errors.HFValidationError("bad id"), "bad id"),
        (ConnectionError("no route"), "no route"),
        (huggingface_hub.errors.HfHubHTTPError.__bases__[0]("peer closed"), "peer closed"),
        (OSError(), "OSError"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be stored in the hub's cache: No space left"),
    ],
)
def test_hub_failures(monkeypatch, error, says):
    def download(hub_id, allow_patterns):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(DownloadError, match=f"some-org/model.*{says}"):
        open_model("some-org/model")


def test_the_hubs_client_is_not_imported_before_it_is_asked():
    looked = "import sys, slipstream.load; print('huggingface_hub.hf_api' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True).stdout == "False\n"


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}/[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True))
def test_hub_ids_are_recognised(name):
    assert hub.is_hub_id(name)
    assert not hub.is_hub_id("/" + name)
    assert not hub.is_hub_id(name + "/x")


def test_everything_promised_is_there():
    assert slipstream.load.__all__ == sorted(slipstream.load.__all__)
    for name in slipstream.load.__all__:
        assert getattr(slipstream.load, name) is not None
