"""open_model: what each kind of name resolves to, and what it says when it cannot."""

from __future__ import annotations

import errno
import re
import subprocess
import sys

import huggingface_hub.errors
import numpy as np
import pytest
import tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import Options

import slipstream.load
from slipstream.errors import DownloadError, HeadError, LoadError
from slipstream.load import open_model
from slipstream.load.contents import main_type
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
    with pytest.raises(HeadError, match=r"cannot be used: .*fc\.weight is \[576, 1152\], this model needs \[64, 128\]"):
        open_model(target, str(slipstream.load.default_head_path()))
    assert open_model(str(default_gguf), str(slipstream.load.default_head_path())).head is not None
    with pytest.raises(LoadError, match="given as the MTP head"):
        open_model(target, str(tmp_path / "nowhere.safetensors"))
    with pytest.raises(LoadError, match=r"/dev/null, given as the MTP head, is neither a file nor a folder\."):
        open_model(target, "/dev/null")


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path, build):
    path = build.gguf(tmp_path / "my-model.gguf")
    for other in ("mtp-my-model.gguf", "mmproj-my-model.gguf", "head.safetensors"):
        (tmp_path / other).write_bytes(b"not a model")
    opened = open_model(str(tmp_path))
    assert (opened.name, opened.path) == ("my-model", path)


def test_a_folder_with_several_gguf_models_names_them(tmp_path):
    for name in ("b.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "mtp-a.gguf"):
        (tmp_path / name).write_bytes(b"")
    choices = f"{tmp_path}/a-00001-of-00002.gguf, {tmp_path}/b.gguf"
    with pytest.raises(LoadError, match=re.escape(f"{tmp_path} holds GGUF files: give one of {choices}.")):
        open_model(str(tmp_path))
    for name in "cdefgh":
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match=r"/f\.gguf or 2 more\."):
        open_model(str(tmp_path))


def test_a_folder_with_a_head_alone(tmp_path):
    (tmp_path / "mtp-a.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match="holds GGUF files, but none of a model"):
        open_model(str(tmp_path))


def test_a_gguf_in_another_models_folder_is_not_taken_for_it(tmp_path, build):
    folder = build.llama_folder(tmp_path / "my-folder")
    build.gguf(folder / "x.gguf")
    assert open_model(str(folder)).name == "my-folder"


@pytest.mark.parametrize("given", [0, 1, 2, None])
def test_a_split_model_has_its_name_without_the_part(tmp_path, given):
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    tiny_gguf.write(model, tmp_path / "my-model.gguf", Options(parts=3))
    parts = [tmp_path / f"my-model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    opened = open_model(str(tmp_path if given is None else parts[given]))
    assert (opened.name, opened.path) == ("my-model", parts[given or 0])


@pytest.mark.parametrize("inside", [False, True])
def test_weights_without_their_folder(tmp_path, build, monkeypatch, inside):
    folder = build.llama_folder(tmp_path / "my-folder")
    monkeypatch.chdir(folder)
    name = "model.safetensors" if inside else str(folder / "model.safetensors")
    with pytest.raises(LoadError, match=f"model.safetensors holds weights alone: give its folder, {folder}$"):
        open_model(name)


@pytest.mark.parametrize("given", ["folder", "relative", "file"])
def test_a_link_that_leads_nowhere_is_no_name_on_the_hub(tmp_path, monkeypatch, given):
    """As in a copy of a hub's snapshot without the files that it links to."""
    monkeypatch.setattr(slipstream.load, "fetch_folder", lambda name: pytest.fail(f"asked the hub for {name}"))
    folder = tmp_path / "org" / "model-GGUF"
    folder.mkdir(parents=True)
    (folder / "x.gguf").symlink_to(tmp_path / "blobs" / "gone")
    monkeypatch.chdir(tmp_path)
    name = {"folder": str(folder), "relative": "org/model-GGUF", "file": str(folder / "x.gguf")}[given]
    with pytest.raises(LoadError, match=r"x\.gguf is neither a file nor a folder: its link leads nowhere\.$"):
        open_model(name)


def test_what_a_folder_without_a_model_lacks(tmp_path):
    for any_architecture in (False, True):
        with pytest.raises(LoadError, match=rf"^{tmp_path} holds no model: give a folder with config\.json and"):
            open_model(str(tmp_path), any_architecture=any_architecture)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(LoadError, match=rf"^{tmp_path} has weights but no config\.json: fetch it into the folder"):
        open_model(str(tmp_path))


def test_a_folder_that_is_called_like_a_model(tmp_path):
    (tmp_path / "dir.gguf").mkdir()
    with pytest.raises(LoadError, match="holds GGUF files, but none of a model"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("name", ["x.gguf", "my-folder/model.safetensors", "my-folder/config.json"])
def test_a_git_lfs_pointer(tmp_path, build, name):
    folder = build.llama_folder(tmp_path / "my-folder")
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 135\n")
    with pytest.raises(LoadError, match=f"{path} is a Git LFS pointer, not the file itself: `git lfs pull`"):
        open_model(str(path if path.parent == tmp_path else folder))


def test_a_device_is_no_model():
    with pytest.raises(LoadError, match=r"^/dev/null is neither a file nor a folder\.$"):
        open_model("/dev/null")


def test_the_main_type_of_weights_that_only_their_runner_can_count(tmp_path, build):
    """MLX's own layout: the type of most bytes."""
    folder, name = build.llama_folder(tmp_path / "my-folder"), "model.layers.0.mlp.up_proj"
    packed = {
        f"{name}.weight": ("U32", np.zeros((64, 8), np.int32)),
        f"{name}.scales": ("F32", np.zeros((64, 1), "<f4")),
    }
    (folder / "model.safetensors").write_bytes(build.safetensors_bytes(packed))
    assert main_type(open_model(str(folder), any_architecture=True)) == "U32"


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

    def download(hub_id, allow_patterns, tqdm_class):
        asked.append((hub_id, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(hub, "_names", lambda hub_id: ["model.safetensors"])
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
        (OSError(errno.ENOENT, "No such file", "/a"), r"cannot be stored in the hub's cache \(/a\): No such file"),
    ],
)
def test_hub_failures(monkeypatch, error, says):
    def download(hub_id, allow_patterns, tqdm_class):
        raise error

    monkeypatch.setattr(hub, "_names", lambda hub_id: [])
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
