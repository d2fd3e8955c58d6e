"""Settings from four places, and what is said about wrong ones."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slipstream.cli import build_parser, main
from slipstream.commands.arguments import num_bytes
from slipstream.commands.configuration import parse
from slipstream.errors import ConfigError

VARIABLES = ("PORT", "MODEL", "ALLOWED_HOST", "DRAFT", "RANDOM_WEIGHTS", "CONFIG", "API_KEY", "STREAMS", "KV_MEMORY")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, and no settings in the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(f"SLIPSTREAM_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def args(*argv: str) -> Namespace:
    return parse(build_parser(), argv)


def write(text: str, name: str = "slipstream.toml") -> None:
    Path(name).write_text(text)


def test_command_line_beats_environment_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert args("serve").port == 8000
    write("port = 1\n")
    assert args("serve").port == 1
    monkeypatch.setenv("SLIPSTREAM_PORT", "2")
    assert args("serve").port == 2
    assert args("serve", "--port", "3").port == 3
    assert args("serve", "--port", "8000").port == 8000, "given, though it is the default"


def test_a_list_is_replaced_not_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    write('allowed-host = ["a", "b"]\n')
    assert args("serve").allowed_host == ["a", "b"]
    monkeypatch.setenv("SLIPSTREAM_ALLOWED_HOST", "c, d")
    assert args("serve").allowed_host == ["c", "d"]
    assert args("serve", "--allowed-host", "e").allowed_host == ["e"]
    monkeypatch.setenv("SLIPSTREAM_PROMPT", "One, two, what comes next?")
    assert args("generate").prompt == ["One, two, what comes next?"]
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "one,key")
    assert args("serve").api_key == ["one,key"], "half a key opens nothing"


def test_the_file_spells_names_with_either_dash_and_has_sections() -> None:
    write(
        """
        model = "here"      # for every command
        max_streams = 2
        kv-memory = "1.5 GiB"
        spec-draft-n-max = 3
        [serve]
        model = "there"
        random-weights = true
        keep-alive = 2
        [bench]
        streams = [1, 2]
        [bench.step]
        rows = [4]
        """
    )
    serve = args("serve")
    assert (serve.model, serve.max_streams, serve.max_depth, serve.keep_alive) == ("there", 2, 3, 2.0)
    assert serve.kv_memory == 3 << 29
    assert serve.random_weights
    generate = args("generate", "--prompt", "x")
    assert (generate.model, generate.random_weights, generate.prompt) == ("here", False, ["x"])
    assert args("bench", "streams").streams == [1, 2]
    assert args("bench", "step").rows == [4]
    assert args("serve", "elsewhere").model == "elsewhere"


def test_another_file_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    write("port = 1\n")
    write("port = 2\n", "other.toml")
    assert args("serve", "--config", "other.toml").port == 2
    assert args("serve", "--config", "").port == 8000
    monkeypatch.setenv("SLIPSTREAM_CONFIG", "other.toml")
    assert args("serve").port == 2
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        args("serve", "--config", "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = 1\nb = 1\n", "slipstream.toml, line 1: a is no setting"),
        ("\nmax-stream = 1\n", "slipstream.toml, line 2: max-stream is no setting; is max-streams meant?"),
        ("[serve]\nport = 1\nsystem = 'x'\n", "slipstream.toml, line 3: system is no setting of serve"),
        ("[serv]\nport = 1\n", "slipstream.toml, line 1: [serv] is no command; is serve meant?"),
        ("port = 1\n[bench]\nstrems = [1]\n", "line 3: strems is no setting of bench; is streams meant?"),
        ("port = 'x'\n", "slipstream.toml, line 1: port must be a whole number, not 'x'"),
        ("port = true\n", "port must be a whole number, not True"),
        ("keep-alive = 'long'\n", "keep-alive must be a number, not 'long'"),
        ("random-weights = 'yes'\n", "random-weights must be true or false, not 'yes'"),
        ("model = 5\n", "model must be text, not 5"),
        ("model = ['a', 'b']\n", "model must be text"),
        ("kv-memory = 'much'\n", "line 1: kv-memory: a size such as 500MB, 2G or 1.5GiB, not 'much'"),
        ("draft = 99\n", "draft must be 'off', 'solo', 'adaptive'"),
        ("dtype = 'int3'\n", "dtype must be one of auto, float32"),
        ("config = 'x'\n", "config is no setting"),
        ("port 1\n", "slipstream.toml is not TOML: Expected '='"),
    ],
)
def test_wrong_files_are_one_sentence(capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    write(text)
    assert main(["serve"]) == 1
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PORT", "tcp://10.0.0.1:8000", "SLIPSTREAM_PORT must be a whole number, not 'tcp://10.0.0.1:8000'"),
        ("RANDOM_WEIGHTS", "perhaps", "SLIPSTREAM_RANDOM_WEIGHTS must be true or false, not 'perhaps'"),
        ("KV_MEMORY", "2 bananas", "SLIPSTREAM_KV_MEMORY: a size such as"),
    ],
)
def test_wrong_variables_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"SLIPSTREAM_{name}", value)
    assert main(["serve"]) == 1
    assert said in capsys.readouterr().err


def test_switches_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    write("random-weights = true\n")
    monkeypatch.setenv("SLIPSTREAM_RANDOM_WEIGHTS", "off")
    assert not args("serve").random_weights
    monkeypatch.setenv("SLIPSTREAM_PORT", "")
    assert args("serve").port == 8000, "an empty variable is none"


def test_print_config_says_where_each_setting_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("port = 1\n")
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "hidden")
    with pytest.raises(SystemExit):
        main(["serve", "--print-config", "--max-streams", "3"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["port", "1", "slipstream.toml"] in lines
    assert ["api-key", "(set)", "SLIPSTREAM_API_KEY"] in lines
    assert ["max-streams", "3", "command", "line"] in lines
    assert ["draft", "adaptive", "default"] in lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB", 2 * 10**9),
        ("2G", 2 * 10**9),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2Gi", 2 << 30),
        ("500M", 500 * 10**6),
        ("500MB", 500 * 10**6),
        ("500MiB", 500 << 20),
        ("1.5 GB", 1_500_000_000),
        ("64KiB", 64 << 10),
        ("1T", 10**12),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert num_bytes(text) == expected


def test_the_tiers_of_the_prefix_cache() -> None:
    from slipstream.cli import model_options

    def engine(*argv: str) -> tuple[object, ...]:
        config = model_options(args("serve", *argv)).engine_config
        return config.cache_host, config.cache_dir, config.cache_disk

    assert engine() == (None, None, 20 * 10**9)
    assert engine("--cache-host", "1GiB", "--cache-dir", "here", "--cache-disk", "5G") == (1 << 30, "here", 5 * 10**9)
    assert engine("--cache-host", "0", "--cache-disk", "0") == (0, None, 0)
    write('cache-dir = "there"\ncache-disk = "100GB"\n')
    assert engine() == (None, "there", 10**11)
    for wrong in (("--cache-host", "-1"), ("--cache-disk=-5M",), ("--cache-dir", "")):
        with pytest.raises(ConfigError, match="cache_"):
            engine(*wrong)
