"""GGUF files of hub repositories, by the hub's own client against a hub on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from fake_hub import NO_HUB, FakeHub, environment, fake_hub
from tiny_gguf import Options

from slipstream.load.hf.hub import hub_file

NUM_MANY = 40  # files; the hub's client fetches eight at once

SCRIPT = """
import json, sys
from slipstream.errors import SlipstreamError
from slipstream.load import open_model
for name in sys.argv[1:]:
    try:
        opened = open_model(name)
        print(json.dumps({"name": opened.name, "file": opened.path.name, "reason": opened.head_reason,
            "head": [path.name for path in opened.head.files()] if opened.head else None}))
    except SlipstreamError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""

HEARS = """
import signal, sys
def hear(number, frame):
    print("heard", file=sys.stderr, flush=True)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, hear)
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
    for name in ("tiny_Q8_0.gguf", "tiny-q4_k_m.gguf", "BF16/tiny.gguf", "F32/tiny.gguf"):
        _write(build, root / "some-org" / "Odd" / name)
    for name in ("a/x-Q4_0-00001-of-00002.gguf", "b/x-Q4_0-00001-of-00002.gguf", "b/x-Q4_0-00002-of-00002.gguf"):
        _write(build, root / "some-org" / "Twice" / name)
    build.llama_folder(root / "some-org" / "Folder")
    build.llama_folder(root / "some-org" / "Many")
    for i in range(NUM_MANY):
        (root / "some-org" / "Many" / f"part-{i:02}.safetensors").write_bytes(bytes([i]) * 1000)
    _write(build, root / "some-org" / "Head-beside" / "tiny-Q8_0.gguf")
    (root / "some-org" / "Head-beside" / "mtp.safetensors").write_bytes(bytes(1000))
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
    (folder / "config.json").write_text("{}")
    tiny_gguf.write(model, folder / "MTP" / "mtp-Hybrid-Q4_0.gguf", Options(lambda name: "Q4_0", trunk=False))
    several = folder.with_name("Several-GGUF")
    several.mkdir()
    tiny_gguf.write(model, several / "Hybrid-BF16.gguf", Options(head=False))
    tiny_gguf.write(model, several / "mtp-Hybrid-Q4_0.gguf", Options(lambda name: "Q4_0", trunk=False))
    (several / "mtp-Another-Q8_0.gguf").write_bytes(bytes(1000))
    tiny_gguf.write(model, folder / "MTP" / "mtp-Hybrid-Q8_0.gguf", Options(lambda name: "Q8_0", trunk=False))


def _write(build: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    build.gguf(path)


def opened(hub: FakeHub, cache: Path, name: str, **more: str) -> dict[str, Any]:
    [answer] = all_opened(hub, cache, [name], **more)
    return answer


def all_opened(hub: FakeHub, cache: Path, names: Sequence[str], **more: str) -> list[dict[str, Any]]:
    """One after the other, by one process."""
    hub.sent.clear()
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, env=environment(hub, cache) | more, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()[-len(names) :]]
    return [answer | {"noise": done.stderr} for answer in answers]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("some-org/Tiny-GGUF:UD-Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("some-org/Tiny-GGUF:Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("some-org/Tiny-GGUF:ud-q4_k_m", "Tiny-UD-Q4_K_M.gguf"),
        ("some-org/Tiny-GGUF:Tiny-BF16.gguf", "Tiny-BF16.gguf"),
        ("some-org/Dots:Q8_0", "tiny.Q8_0.gguf"),
        ("some-org/Odd:Q8_0", "tiny_Q8_0.gguf"),
        ("some-org/Odd:Q4_K_M", "tiny-q4_k_m.gguf"),
        ("some-org/Odd:BF16", "BF16/tiny.gguf"),
        ("some-org/Odd:F32/tiny", "F32/tiny.gguf"),
    ],
)
@pytest.mark.each_value
def test_a_file_of_a_repository(hub: FakeHub, tmp_path: Path, name: str, file: str) -> None:
    answer = opened(hub, tmp_path, name)
    assert (answer["name"], answer["file"], answer["head"]) == (name, Path(file).name, None)
    assert hub.sent == [file], "and no other file was fetched"


def test_all_parts_and_the_head_beside_them_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    answer = opened(hub, tmp_path, "some-org/Hybrid-GGUF:UD-Q8_K_XL")
    parts = [f"UD-Q8_K_XL/Hybrid-UD-Q8_K_XL-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert sorted(hub.sent) == ["MTP/mtp-Hybrid-Q8_0.gguf", *parts]
    assert answer["file"] == Path(parts[0]).name
    assert answer["head"] == ["mtp-Hybrid-Q8_0.gguf"]


def test_of_several_heads_that_of_the_model_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    answer = opened(hub, tmp_path, "some-org/Several-GGUF:BF16")
    assert sorted(hub.sent) == ["Hybrid-BF16.gguf", *answer["head"]] == ["Hybrid-BF16.gguf", "mtp-Hybrid-Q4_0.gguf"]


def test_no_other_head_is_fetched_where_the_file_has_one(hub: FakeHub, tmp_path: Path) -> None:
    answer = opened(hub, tmp_path, "some-org/Hybrid-GGUF:IQ4_XS")
    assert hub.sent == answer["head"] == ["Hybrid-IQ4_XS.gguf"]


def test_what_was_fetched_serves_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    name = "some-org/Tiny-GGUF:BF16"
    first = opened(hub, tmp_path, name)["file"]
    assert opened(hub, tmp_path, name)["file"] == first
    assert hub.sent == []
    assert opened(hub, tmp_path, name, **NO_HUB)["file"] == first
    assert opened(hub, tmp_path, name, HF_HUB_OFFLINE="1")["file"] == first


def test_a_folder_that_was_fetched_opens_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    name = "some-org/Folder"
    assert opened(hub, tmp_path, name)["name"] == name
    assert sorted(hub.sent) == ["config.json", "model.safetensors"]
    assert opened(hub, tmp_path, name, **NO_HUB)["name"] == name
    assert hub.sent == []


@pytest.mark.parametrize("name", ["nope", "some-org/nope", "some-org/nope:Q4_K_M"])
@pytest.mark.parametrize("how", ["offline", "unreachable"])
@pytest.mark.each_value
def test_a_mistyped_path_without_the_hub(hub: FakeHub, tmp_path: Path, name: str, how: str) -> None:
    answer = opened(hub, tmp_path, name, **({"HF_HUB_OFFLINE": "1"} if how == "offline" else NO_HUB))
    where = "is no file or folder, not in the hub's local cache, and the hub cannot be reached: "
    error, found, why = answer["error"].partition(where)
    assert (error, bool(found)) == (f"DownloadError: {name.partition(':')[0]} ", True)
    assert ("HF_HUB_OFFLINE" if how == "offline" else "refused") in why


def test_why_the_hub_cannot_be_reached_is_said(hub: FakeHub, tmp_path: Path) -> None:
    error = opened(hub, tmp_path, "some-org/Folder", HF_ENDPOINT="htp://127.0.0.1")["error"]
    assert "the hub cannot be reached: " in error
    assert "htp://" in error


def test_weights_beside_gguf_files_are_no_folder(hub: FakeHub, tmp_path: Path) -> None:
    error = opened(hub, tmp_path, "some-org/Head-beside")["error"]
    assert error == "DownloadError: some-org/Head-beside holds GGUF files: take some-org/Head-beside:Q8_0."


def test_a_head_that_cannot_be_fetched_does_not_stop_the_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.broken = "mtp-"
    try:
        answer = opened(hub, tmp_path, "some-org/Hybrid-GGUF:UD-Q8_K_XL")
    finally:
        hub.broken = ""
    assert answer["file"].startswith("Hybrid-UD-Q8_K_XL")
    assert answer["head"] is None
    assert answer["reason"].startswith("no MTP head: some-org/Hybrid-GGUF ")
    assert "403" in answer["reason"]


def test_a_download_that_was_interrupted_goes_no_further(hub: FakeHub, tmp_path: Path) -> None:
    """From Python, where the process goes on until all its threads have ended."""
    hub.sent.clear()
    hub.open.clear()
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS + SCRIPT, "some-org/Many"], env=environment(hub, tmp_path), stderr=subprocess.PIPE
    )
    try:
        until = time.monotonic() + 60
        while not hub.sent and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while (line := process.stderr.readline()) and not line.endswith(b"heard\n"):
            pass
        time.sleep(0.5)  # for the few instructions after that, before what was asked for is sent
        hub.open.set()
        with process.stderr:
            assert b"KeyboardInterrupt" in process.stderr.read()
        process.wait(timeout=60)
        assert 0 < len(hub.sent) <= NUM_MANY // 2
    finally:
        process.kill()
        hub.open.set()


@pytest.mark.parametrize("name", ["some-org/Tiny-GGUF:Q4_K_M", "some-org/Folder"])
@pytest.mark.each_value
def test_a_cache_that_cannot_be_written_is_not_the_hubs_fault(hub: FakeHub, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    error = opened(hub, tmp_path / "file" / "cache", name)["error"]
    assert "cannot be stored in the hub's cache" in error
    assert str(tmp_path / "file") in error


@pytest.mark.parametrize("arguments", [["plan"], ["generate", "--prompt", "x"]])
def test_ctrl_c_ends_a_download(hub: FakeHub, tmp_path: Path, arguments: list[str]) -> None:
    hub.sent.clear()
    hub.open.clear()
    command = [sys.executable, "-m", "slipstream.cli", *arguments, "some-org/Tiny-GGUF:Q4_K_M"]
    # As in a terminal, Ctrl-C is not ignored, whatever started the tests.
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment(hub, tmp_path), stderr=subprocess.PIPE, preexec_fn=reset)
    try:
        until = time.monotonic() + 60
        while not hub.sent and time.monotonic() < until:
            time.sleep(0.05)
        assert hub.sent == ["Tiny-Q4_K_M.gguf"]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert b"Traceback" not in said
    finally:
        process.kill()
        hub.open.set()


NOT_THERE = [
    ("some-org/Tiny-GGUF:Q9_K", "has no GGUF file 'Q9_K': it has BF16, Q4_K_M, UD-Q4_K_M, UD-Q4_K_XL."),
    ("some-org/Tiny-GGUF:F16", "has no GGUF file 'F16'"),  # BF16 is another type, mmproj another file
    ("some-org/Tiny-GGUF", "holds GGUF files: choose one, some-org/Tiny-GGUF:BF16 or another of BF16, Q4_K_M"),
    ("some-org/Hybrid-GGUF", "holds GGUF files: choose one, some-org/Hybrid-GGUF:IQ4_XS"),  # it has a config.json
    ("some-org/Dots", "holds GGUF files: take some-org/Dots:Q8_0."),
    ("some-org/Odd:Q9_K", "it has BF16, F32, Q8_0, q4_k_m."),
    ("some-org/Odd:tiny", "has 2 models 'tiny': choose one, some-org/Odd:BF16 or another of BF16, F32."),
    (
        "some-org/Twice:Q4_0",
        "some-org/Twice has 2 models 'Q4_0': choose one, some-org/Twice:a/x-Q4_0 or another of a/x-Q4_0, b/x-Q4_0.",
    ),
    ("some-org/Twice:a/x-Q4_0", "has 1 of the 2 parts of a/x-Q4_0: all are needed"),
    ("some-org/Tiny-GGUF:mmproj-Tiny-F16.gguf", "is not a model in GGUF: it has BF16, Q4_K_M,"),
    ("some-org/Hybrid-GGUF:mtp-Hybrid-Q8_0.gguf", "is not a model in GGUF: it has IQ4_XS, UD-Q8_K_XL."),
    ("some-org/Nothing:Q4_K_M", "neither a local path nor a model on the hub"),
]


def test_what_is_not_there_is_said(hub: FakeHub, tmp_path: Path) -> None:
    answers = all_opened(hub, tmp_path, [name for name, _ in NOT_THERE])
    for (_, says), answer in zip(NOT_THERE, answers, strict=True):
        assert answer["error"].startswith("DownloadError: ")
        assert says in answer["error"]
    assert not hub.sent
    assert not answers[0]["noise"], "the hub's client says nothing of its own"


def test_names_with_a_file() -> None:
    assert hub_file("unsloth/Qwen3.8-27B-GGUF:UD-Q4_K_XL") == ("unsloth/Qwen3.8-27B-GGUF", "UD-Q4_K_XL")
    assert hub_file("some-org/x:Q8_0/a file") == ("some-org/x", "Q8_0/a file")
    for other in ("unsloth/Qwen3.8-27B-GGUF", "a:b", "/a/b:c", "a/b/c:d", "a/b:", "a/b:/c", "C:\\\\a/b"):
        assert hub_file(other) is None
