"""What `slipstream serve` says when a model is loaded: its type, its head, and why there are no drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from tiny_gguf import Options

from slipstream.commands.options import ModelOptions
from slipstream.commands.serve import Loading

COMMAND = [sys.executable, "-m", "slipstream.cli"]
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


def said(path: Path, runner: str = "torch", **more: Any) -> dict[str, str]:
    """The lines by their first word."""
    lines: list[str] = []
    options = ModelOptions(str(path), runner=runner, device="cpu", max_streams=1, max_context=64, **more)
    loading = Loading(options, lines.append)
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


@pytest.mark.parametrize(
    ("setting", "drafts"),
    [
        ({"draft": "off"}, "off, but for requests that ask for drafts: at most 4 deep, p_min 0"),
        ({"draft": 0}, "off, but for requests that ask for drafts: at most 4 deep, p_min 0"),
        ({"draft": 2, "p_min": 0.5}, "depth 2, at most 4 deep, p_min 0.5"),
    ],
)
def test_what_drafts_and_what_does_not(folder: Path, setting: dict[str, Any], drafts: str) -> None:
    assert said(folder / "whole.gguf", **setting)["drafts"] == drafts


def test_what_becomes_floats_on_mlx(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    kinds = {"ffn_down": "Q2_K", "ffn_up": "Q6_K", "ffn_gate": "Q6_K"}
    options = Options(lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_K"))
    path = tiny_gguf.write(model, tmp_path / "x.gguf", options).path
    mlp = {name: weight.numel() for name, weight in model.state_dict().items() if ".mlp." in name}
    share = sum(mlp.values()) / sum(weight.numel() for weight in model.state_dict().values())
    assert said(path, "mlx")["weights"] == f"{100 * share:.0f} % of the weights become float32 on MLX (Q6_K, Q2_K)"
    assert "weights" not in said(path)


def test_a_log_in_json_is_json_from_the_first_line_on() -> None:
    shape = ["--shape", "tiny", "--random-weights", "--device", "cpu", "--draft", "off"]
    command = [*COMMAND, "serve", "--port", "0", "--log-format", "json", *shape]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = [json.loads(process.stdout.readline())["message"]]
        while not said[-1].startswith("page"):
            said.append(json.loads(process.stdout.readline())["message"])
    finally:
        process.terminate()
        process.communicate(timeout=300)
    assert [line.split()[0] for line in said[:2]] == ["listening", "loading:"]
