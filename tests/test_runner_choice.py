"""`--runner auto|torch|mlx`: which one is taken where, and what is said when it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import tiny

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.runners import choose
from slipstream.runners.choose import choose_library

NO_MLX = "MLX is not installed: pip install '.[mlx]'"


@pytest.mark.parametrize(
    ("platform", "installed", "chosen"),
    [("darwin", True, "mlx"), ("darwin", False, "torch"), ("linux", True, "torch"), ("linux", False, "torch")],
)
def test_auto_takes_mlx_on_a_mac_that_has_it(
    monkeypatch: pytest.MonkeyPatch, platform: str, installed: bool, chosen: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(choose, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    assert choose_library("auto") == chosen
    assert choose_library("torch") == "torch"


def test_mlx_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    assert main(["generate", "--runner", "mlx", "--prompt", "hello"]) == 1
    assert "pip install '.[mlx]'" in capsys.readouterr().err


def test_random_weights_are_made_by_torch_only(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm", reason=NO_MLX)
    assert main(["bench", "step", "--runner", "mlx", "--shape", "tiny", "--random-weights"]) == 1
    assert "torch runner only" in capsys.readouterr().err


def test_mlx_plans_and_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm", reason=NO_MLX)
    assert main(["plan", "--json", "--runner", "mlx", "--max-streams", "2", "--kv-memory", "50M"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 40e6 < plan["kv_pool"] + plan["row_buffers"] < 51e6
    assert plan["total"] > plan["weights"] > plan["head"] > 0
    monkeypatch.setattr("slipstream.runners.mlx.device.COPY_BYTES", {"gpu": 1 << 20, "cpu": 1 << 20})
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path, head=True)
    step = ["--rows", "1,2", "--depths", "0,1", "--steps", "2", "--context", "8"]
    assert main(["bench", "step", str(folder), "--runner", "mlx", *step]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(each["rows"], each["depth"]) for each in report["results"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert report["results"][1]["must_move"] > report["results"][0]["must_move"] > 0
    assert {"slipstream", "mlx"} <= report["versions"].keys()


def test_mlx_serves_without_our_torch_runner() -> None:
    pytest.importorskip("mlx_lm", reason=NO_MLX)
    script = (
        "import os, sys\nfrom slipstream.commands.options import ModelOptions\n"
        "from slipstream.commands.serve import Loading\n"
        "loaded = Loading(ModelOptions(runner='mlx', max_streams=1, max_context=64, draft='off'))(lambda error: None)\n"
        "loaded.engine.start()\nloaded.engine.close()\n"
        "assert loaded.facts.kv_token_bytes and loaded.facts.runner == 'mlx'\n"
        "assert not [name for name in sys.modules if name.startswith('slipstream.runners.torch')]\n"
        "os._exit(0)"  # MLX's own threads on Linux now and then end a process that exits in order with an abort
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_mlxs_threads_do_not_abort_a_command_that_is_done() -> None:
    """On Linux they do in most processes that run a model; here another thread would keep the interpreter alive."""
    pytest.importorskip("mlx_lm", reason=NO_MLX)
    script = (
        "import sys, threading\nimport mlx.core\nfrom slipstream import cli\n"
        "cli.main = lambda: print('done') or 3\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "sys.exit(cli.entry())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"dtype": "int8"}, {"dtype": "int4"}, {"kv_dtype": "fp8"}])
def test_options_that_mlx_does_not_have(options: dict[str, str]) -> None:
    pytest.importorskip("mlx_lm", reason=NO_MLX)
    with pytest.raises(ConfigError, match="on MLX"):
        LLM(runner="mlx", max_streams=1, **options)  # type: ignore[arg-type]
