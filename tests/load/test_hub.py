"""GGUF files of hub repositories, by the hub's own client against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from fake_hub import FakeHub, fake_hub
from tiny_gguf import Options

from slipstream.load.hf.hub import hub_file

SCRIPT = """
import json, sys
from slipstream.errors import SlipstreamError
from slipstream.load import open_model
try:
    opened = open_model(sys.argv[1])
    print(json.dumps({"name": opened.name, "file": opened.path.name, "reason": opened.head_reason,
        "head": [path.name for path in opened.head.files()] if opened.head else None}))
except SlipstreamError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, build: Any) -> Iterator[FakeHub]:
    root = tmp_path_factory.mktemp("hub")
    files = root / "some-org" / "Tiny-GGUF"
    for quant in ("Q4_K_M", "UD-Q4_K_M", "UD-Q4_K_XL", "BF16"):
        _write(build, files / f"Tiny-{quant}.gguf")
    for name in ("mmproj-Tiny-F16.gguf", "README.md", "imatrix_Tiny.gguf"):
        (files / name).write_bytes(b"not a model")
    _write(build, root / "some-org" / "Dots" / "tiny.Q8_0.gguf")
    _write_hybrids(root / "some-org" / "Hybrid-GGUF")
    with fake_hub(root) as hub:
        yield hub


def _write_hybrids(folder: Path) -> None:
    """A trunk in parts, in a folder of its own; heads in another; and a file with its own head."""
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    for name in ("UD-Q8_K_XL", "MTP"):
        (folder / name).mkdir(parents=True)
    tiny_gguf.write(model, folder / "UD-Q8_K_XL" / "Hybrid-UD-Q8_K_XL.gguf", Options(head=False, parts=3))
    tiny_gguf.write(model, folder / "Hybrid-IQ4_XS.gguf")
    tiny_gguf.write(model, folder / "MTP" / "mtp-Hybrid-Q4_0.gguf", Options(lambda name: "Q4_0", trunk=False))
    tiny_gguf.write(model, folder / "MTP" / "mtp-Hybrid-Q8_0.gguf", Options(lambda name: "Q8_0", trunk=False))


def _write(build: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    build.gguf(path)


def opened(hub: FakeHub, cache: Path, name: str, **more: str) -> dict[str, Any]:
    hub.sent.clear()
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own | more
    command = [sys.executable, "-c", SCRIPT, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("some-org/Tiny-GGUF:UD-Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("some-org/Tiny-GGUF:Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("some-org/Tiny-GGUF:ud-q4_k_m", "Tiny-UD-Q4_K_M.gguf"),
        ("some-org/Tiny-GGUF:Tiny-BF16.gguf", "Tiny-BF16.gguf"),
        ("some-org/Dots:Q8_0", "tiny.Q8_0.gguf"),
    ],
)
@pytest.mark.each_value
def test_a_file_of_a_repository(hub: FakeHub, tmp_path: Path, name: str, file: str) -> None:
    answer = opened(hub, tmp_path, name)
    assert (answer["name"], answer["file"], answer["head"]) == (name, file, None)
    assert hub.sent == [file], "and no other file was fetched"


def test_all_parts_and_the_head_beside_them_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    answer = opened(hub, tmp_path, "some-org/Hybrid-GGUF:UD-Q8_K_XL")
    parts = [f"UD-Q8_K_XL/Hybrid-UD-Q8_K_XL-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert sorted(hub.sent) == ["MTP/mtp-Hybrid-Q8_0.gguf", *parts]
    assert answer["file"] == Path(parts[0]).name
    assert answer["head"] == ["mtp-Hybrid-Q8_0.gguf"]


def test_no_other_head_is_fetched_where_the_file_has_one(hub: FakeHub, tmp_path: Path) -> None:
    answer = opened(hub, tmp_path, "some-org/Hybrid-GGUF:IQ4_XS")
    assert hub.sent == answer["head"] == ["Hybrid-IQ4_XS.gguf"]


def test_what_was_fetched_serves_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    name = "some-org/Tiny-GGUF:BF16"
    first = opened(hub, tmp_path, name)
    assert opened(hub, tmp_path, name) == first
    assert hub.sent == []
    assert opened(hub, tmp_path, name, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_ETAG_TIMEOUT="1") == first
    assert opened(hub, tmp_path, name, HF_HUB_OFFLINE="1") == first


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("some-org/Tiny-GGUF:Q9_K", "has no GGUF file 'Q9_K': it has BF16, Q4_K_M, UD-Q4_K_M, UD-Q4_K_XL."),
        ("some-org/Tiny-GGUF:F16", "has no GGUF file 'F16'"),  # BF16 is another type, mmproj another file
        ("some-org/Tiny-GGUF", "holds GGUF files: choose one, some-org/Tiny-GGUF:BF16 or another of BF16, Q4_K_M"),
        ("some-org/Nothing:Q4_K_M", "neither a local path nor a model on the hub"),
    ],
)
@pytest.mark.each_value
def test_what_is_not_there_is_said(hub: FakeHub, tmp_path: Path, name: str, says: str) -> None:
    error = opened(hub, tmp_path, name)["error"]
    assert error.startswith("DownloadError: some-org/")
    assert says in error
    assert not any(sent.endswith(".gguf") for sent in hub.sent)


def test_names_with_a_file() -> None:
    assert hub_file("unsloth/Qwen3.8-27B-GGUF:UD-Q4_K_XL") == ("unsloth/Qwen3.8-27B-GGUF", "UD-Q4_K_XL")
    for other in ("unsloth/Qwen3.8-27B-GGUF", "a:b", "/a/b:c", "a/b/c:d", "a/b:", "C:\\\\a/b"):
        assert hub_file(other) is None
