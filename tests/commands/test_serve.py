"""What `slipstream serve` says when a model is loaded: its type, its head, and why there are no drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
from tiny_gguf import Options

from slipstream.commands.options import ModelOptions
from slipstream.commands.serve import Loading

HEAD = "blk.2."  # after two layers


def kinds(name: str) -> str:
    """Most weights in Q4_K; most bytes in F32, those of embedding, output and head."""
    return "F32" if name.startswith((HEAD, "token_embd", "output")) else "Q4_K"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    tiny_gguf.write(model, folder / "whole.gguf", Options(kinds))
    (folder / "alone").mkdir()
    for target in (folder / "beside.gguf", folder / "alone" / "alone.gguf"):
        tiny_gguf.write(model, target, Options(kinds, head=False))
    tiny_gguf.write(model, folder / "mtp-beside.gguf", Options(kinds, trunk=False))
    return folder


def said(path: Path) -> dict[str, str]:
    """The lines by their first word."""
    lines: list[str] = []
    loading = Loading(ModelOptions(str(path), device="cpu", max_streams=1, max_context=64), lines.append)
    loaded = loading(lambda error: None)
    loaded.engine.start()
    loading.ready(loaded, "http://127.0.0.1/")
    loaded.engine.close()
    return {word: rest.strip() for word, _, rest in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize(
    ("name", "head"),
    [("whole", "its MTP head in the model's own files"), ("beside", "its MTP head in mtp-beside.gguf")],
)
def test_the_type_of_most_weights_and_where_the_head_is(folder: Path, name: str, head: str) -> None:
    lines = said(folder / f"{name}.gguf")
    assert lines["model"] == f"{name} (qwen3_5; GGUF, Q4_K), {head}"
    assert lines["drafts"].startswith("adaptive, ")


def test_why_there_is_no_head_is_said_once(folder: Path) -> None:
    lines = said(folder / "alone" / "alone.gguf")
    assert lines["model"] == "alone (qwen3_5; GGUF, Q4_K), no MTP head"
    assert lines["drafts"] == "off: no MTP head: the checkpoint has no nextn.* tensors; give one with --mtp"
