"""`--runner auto|torch|mlx`: which one is taken where, and what is said when it cannot be."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

import pytest

from slipstream import llm
from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.llm import LLM, choose_runner


@pytest.mark.parametrize(
    ("platform", "installed", "chosen"),
    [("darwin", True, "mlx"), ("darwin", False, "torch"), ("linux", True, "torch"), ("linux", False, "torch")],
)
def test_auto_takes_mlx_on_a_mac_that_has_it(
    monkeypatch: pytest.MonkeyPatch, platform: str, installed: bool, chosen: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(llm, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    assert choose_runner("auto") == chosen
    assert choose_runner("torch") == "torch"


def test_mlx_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(llm, "find_spec", lambda name: None)
    assert main(["generate", "--runner", "mlx", "--prompt", "hello"]) == 1
    assert "pip install 'slipstream[mlx]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["bench", "step"]])
def test_what_only_torch_can_do_says_so(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install 'slipstream[mlx]'")
    assert main([*command, "--runner", "mlx"]) == 1
    assert "--runner torch" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"dtype": "int8"}, {"dtype": "int4"}])
def test_options_that_mlx_does_not_have(options: dict[str, str]) -> None:
    pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install 'slipstream[mlx]'")
    with pytest.raises(ConfigError, match="on MLX"):
        LLM(runner="mlx", max_streams=1, **options)  # type: ignore[arg-type]
