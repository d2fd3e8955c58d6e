"""`slipstream plan` of a GGUF file: what it holds, where its head is, and the memory of each part."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import tiny_gguf
from tiny_chat_model import write_tiny_chat_model
from tiny_gguf import Options

from slipstream.cli import main

SMALL = ("--max-streams", "2", "--kv-memory", "4M", "--device", "cpu")


def kinds(name: str) -> str:
    return "Q6_K" if "ffn_down" in name or name == "output.weight" else "Q4_K"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_gguf.wide(moe=True)
    tiny_gguf.write(model, folder / "Tiny-Q4_K_M.gguf", Options(kinds, head=False))
    tiny_gguf.write(model, folder / "Whole-Q4_K_M.gguf", Options(kinds))
    tiny_gguf.write(model, folder / "mtp-Tiny-Q8_0.gguf", Options(lambda name: "Q8_0", trunk=False))
    return folder


def report(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, object]:
    assert main(["plan", "--json", str(path), *SMALL]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder / "Tiny-Q4_K_M.gguf"), *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Tiny-Q4_K_M (qwen3_5_moe), with its MTP head"
    assert lines[1].startswith("files: GGUF, 5.")
    assert " bits a weight: Q4_K " in lines[1]
    assert lines[2].startswith("head: in mtp-Tiny-Q8_0.gguf, GGUF, ")
    assert " 8.5" in lines[2]
    assert ": Q8_0 99" in lines[2]
    for part in ("experts", "recurrent layers", "attention", "embedding and output"):
        assert any(line.startswith(f"    {part} ") for line in lines)


def test_what_was_given_and_what_only_requests_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder / "Whole-Q4_K_M.gguf"), *SMALL, "--memory", "2GiB", "--draft", "off"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Whole-Q4_K_M (qwen3_5_moe), with its MTP head, for requests that ask for drafts"
    assert [line for line in lines if line.startswith("  in all, of 2.15 GB given   ")]


def test_as_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, folder / "Tiny-Q4_K_M.gguf")
    files, parts = found["files"], found["weight_parts"]
    assert isinstance(files, dict)
    assert isinstance(parts, dict)
    assert sum(parts.values()) == found["weights"]
    assert sum(files["types"].values()) == pytest.approx(1, abs=1e-3)
    assert 4.5 < files["bits_per_weight"] < 6.5625  # between those of Q4_K and Q6_K
    assert found["head_place"] == "in mtp-Tiny-Q8_0.gguf"
    inside = report(capsys, folder / "Whole-Q4_K_M.gguf")
    assert inside["head_place"] == "in the model's own files"
    assert isinstance(inside["head_files"], dict)
    assert "Q6_K" in inside["head_files"]["types"]
    (folder / "mtp-Tiny-Q8_0.gguf").rename(folder / "away.gguf")
    alone = report(capsys, folder / "Tiny-Q4_K_M.gguf")
    assert (alone["head_place"], alone["head_files"], alone["head"]) == ("", None, 0)
    (folder / "away.gguf").rename(folder / "mtp-Tiny-Q8_0.gguf")


def test_why_there_is_no_head_is_said_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = shutil.copy(folder / "Tiny-Q4_K_M.gguf", tmp_path)
    assert main(["plan", str(alone), *SMALL]) == 0
    missing = "the checkpoint has no nextn.* tensors; give one with --mtp"
    assert capsys.readouterr().out.splitlines()[0] == f"Tiny-Q4_K_M (qwen3_5_moe), no MTP head: {missing}"


def test_a_head_that_was_given_and_cannot_be_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the model has one of its own."""
    model, bad = str(folder / "Whole-Q4_K_M.gguf"), folder / "bad.gguf"
    bad.write_bytes((folder / "mtp-Tiny-Q8_0.gguf").read_bytes()[:5000])
    assert main(["plan", model, "--mtp", str(bad), *SMALL]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"slipstream: The MTP head that was given cannot be used: {bad} ")
    assert said.err.count("\n") == 1


def test_four_streams_of_16k_beside_a_27b_mix_fit_24_gib(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    model = ("--shape", "qwen3.5-27b", "--stored-as", "UD-Q4_K_XL", "--device", "cuda", "--memory", "24GiB")
    assert main(["plan", "--json", *model, "--max-streams", "4", "--max-context", "16384"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"] < 24 << 30
    assert found["num_blocks"] * found["block_size"] >= 4 * 16384
    assert found["num_states"] == 4


def test_on_mlx(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What becomes floats there, and the memory of each part."""
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    options = (str(folder / "Whole-Q4_K_M.gguf"), "--runner", "mlx", "--dtype", "bfloat16", *SMALL)
    assert main(["plan", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    [note] = [line for line in lines if " become " in line]
    share = next(float(word) for word in lines[1].split("Q6_K ")[1].split())
    assert note == f"{share:.0f} % of the weights become bfloat16 on MLX (Q6_K)"
    for part in ("experts", "recurrent layers", "attention", "embedding and output"):
        assert any(line.startswith(f"    {part} ") for line in lines)
    assert main(["plan", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights_note"] == note
    assert sum(found["weight_parts"].values()) == found["weights"]
    assert found["workspace"] > 0


def test_of_a_folder_in_mlxs_own_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many weights there are is not in its tensors: only bytes are listed."""
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_config, load_model, quantize_model

    raw, converted = write_tiny_chat_model(tmp_path), tmp_path / "converted"
    converted.mkdir()
    model, config = quantize_model(load_model(raw)[0], load_config(raw), 32, 4)
    mx.save_safetensors(str(converted / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (converted / "config.json").write_text(json.dumps(config))
    shutil.copy(raw / "tokenizer.json", converted)
    capsys.readouterr()  # mlx-lm's own words
    assert main(["plan", str(converted), "--runner", "mlx", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"files: safetensors, [\d.]+ MB", lines[1])
    assert not [line for line in lines if " become " in line]
    assert main(["plan", "--json", str(converted), "--runner", "mlx", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files"]["bits_per_weight"], found["files"]["types"]) == (None, {})
    assert found["files"]["bytes"] == pytest.approx(found["weights"], rel=0.01)
