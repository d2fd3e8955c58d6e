"""The command line as users meet it: real processes for terminals, pipes and exits; `main` for the rest."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from functools import partial

import pytest

from slipstream import __version__
from slipstream.cli import build_parser, main, model_options, server_config
from slipstream.commands.configuration import parse
from slipstream.commands.options import ModelOptions
from slipstream.errors import ConfigError
from slipstream.server.service.settings import ServerConfig

WAIT = 300.0  # a busy machine may be slow; nothing waits this long where all is well
COMMAND = [sys.executable, "-m", "slipstream.cli"]
SMALL = ["--max-streams", "2", "--max-context", "512"]
ONE = ["--max-streams", "1", "--max-context", "512", "--draft", "2"]  # a fixed depth needs no calibration
PARIS = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=WAIT, check=False)


def refused(code: int, message: str, *said: str) -> None:
    assert code == 1
    assert message.startswith("slipstream: ")
    assert message.count("\n") == 1, message
    for part in said:
        assert part in message


# ---- generate ----


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *ONE, "--prompt", PARIS, "--max-tokens", "24"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert re.search(r"8 tokens, \d+\.\d tok/s, (drafted in|not drafted: a plain step was faster)", err)
    assert re.search(r"(tokens a step.*, \d+ of \d+ drafts accepted|not drafted)", err)


def test_generate_json_for_several_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [PARIS, "Name three colours."]
    arguments = ["--json", "--max-tokens", "12", "--prompt", asked[0], "--prompt", asked[1]]
    assert main(["generate", *SMALL, *arguments]) == 0
    report = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in report] == asked
    assert report[0]["text"] == ANSWER
    assert report[0]["finish_reason"] == "stop"
    for each in report:
        assert each["stats"]["output_tokens"] == len(each["token_ids"])
        assert each["stats"]["prompt_tokens"] == len(each["prompt_token_ids"])
        assert each["speculation"].startswith(("drafted in ", "not drafted: "))


def test_generate_samples_as_the_model_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    """Right with every seed; without the model's defaults hardly with any."""
    asked = ["generate", *SMALL, "--max-tokens", "24", *["--prompt", PARIS] * 5]
    assert main([*asked, "--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [ANSWER] * 5
    assert main([*asked, "--seed", "3", "--sampling-defaults", "neutral"]) == 0
    assert ANSWER not in capsys.readouterr().out


def test_generate_reads_a_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PARIS))
    assert main(["generate", *ONE, "--prompt", "-", "--max-tokens", "24"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_generate_raw_continues_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *ONE, "--raw", "--json", "--prompt", "The capital of France is", "--max-tokens", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["prompt_token_ids"]) == 5
    assert report["text"].startswith(" ")


def test_a_reader_that_leaves_is_no_crash() -> None:
    arguments = ["generate", *ONE, "--prompt", PARIS, "--max-tokens", "12"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "Broken pipe" not in err


# ---- plan ----


def test_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--max-streams", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SmolLM2-135M-Instruct (llama), with its MTP head\n")
    for part in ("weights", "MTP head", "KV pool", "in all", "4 of    512 tokens", "--kv-memory"):
        assert part in out


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    assert main(["plan", "--json", *arguments]) == 0
    report: dict[str, int] = json.loads(capsys.readouterr().out)
    return report


def test_the_pool_follows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = plan(capsys, "--kv-memory", "100M"), plan(capsys, "--kv-memory", "200M")
    assert 99e6 < small["kv_pool"] <= 100e6
    assert 199e6 < large["kv_pool"] <= 200e6
    assert large["total"] - small["total"] == pytest.approx(100e6, rel=0.05)
    few, many = plan(capsys, "--max-streams", "8"), plan(capsys, "--max-streams", "16")
    assert few["kv_pool"] * 2 == many["kv_pool"]
    assert plan(capsys, "--max-streams", "1", "--max-context", "256")["kv_pool"] < few["kv_pool"]


def test_the_plan_with_keys_and_values_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """A byte instead of four, and two bytes for those of a head: its width is 64 here."""
    options = ("--device", "cpu", "--kv-memory", "100M")
    floats, coded = plan(capsys, *options), plan(capsys, *options, "--kv-dtype", "fp8")
    assert floats["kv_per_token"] * (64 + 2) == coded["kv_per_token"] * 4 * 64
    assert coded["pool_tokens"] > 3.8 * floats["pool_tokens"]
    assert (floats["kv_dtype"], coded["kv_dtype"]) == ("float32", "fp8")
    assert main(["plan", *options, "--kv-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert ", KV in fp8\n" in out
    assert "KV pool, fp8, " in out


def test_the_plan_with_states_in_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--shape", "qwen3.5-4b", "--device", "cuda", "--memory", "40GB")
    wide, half = plan(capsys, *options), plan(capsys, *options, "--state-dtype", "float16")
    assert (wide["state_dtype"], half["state_dtype"]) == ("float32", "float16")
    assert half["states"] < 0.6 * wide["states"]
    assert main(["plan", *options, "--state-dtype", "float16"]) == 0
    out = capsys.readouterr().out
    assert ", states in float16\n" in out
    assert "  recurrent states, float16, " in out
    assert main(["plan", "--shape", "tiny", "--device", "cpu", "--state-dtype", "float16"]) != 0
    assert "state_dtype float16 needs the Triton kernels of a CUDA GPU, but this is a CPU" in capsys.readouterr().err


def test_the_plan_has_room_for_kept_states(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--shape", "tiny", "--device", "cpu")
    on, off = plan(capsys, *shape), plan(capsys, *shape, "--prefix-cache", "off")
    assert on["kept_states"] == on["num_states"] * on["kept_state"] > 0
    assert off["kept_states"] == off["num_states"] == 0
    assert on["total"] - off["total"] == pytest.approx(on["kept_states"] + on["kv_pool"] - off["kv_pool"], abs=1e6)
    assert main(["plan", *shape]) == 0
    assert "kept states, " in capsys.readouterr().out
    assert main(["plan", *shape, "--prefix-cache", "off"]) == 0
    assert "kept states" not in capsys.readouterr().out


def test_a_plan_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--kv-memory", "1M"])
    refused(code, capsys.readouterr().err, "1.0 MB are left for KV", "1.5 MB", "kv_memory")


# ---- chat ----


def test_chat_through_a_pipe_is_answers_only() -> None:
    quoted = '"""What is the\ncapital of France?"""\n'
    commands = "/new\n\n/what\n/set temperature hot\n/drafts off\n"
    done = run("chat", *ONE, "--max-tokens", "24", text=f"{PARIS}\n{commands}{quoted}/quit\nnever asked\n")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("SmolLM2-135M-Instruct on cpu")
    assert lines[1].startswith("sampling defaults: temperature ")
    assert lines[2].startswith("speculation: ")
    assert lines[4:7] == [ANSWER, "a new conversation", f"/what is no command: {lines[3]}"]
    assert lines[7:] == ["temperature takes a number", "drafts: off", ANSWER]
    first, second = done.stderr.splitlines()
    assert re.search(r"^8 tokens, \d+\.\d tok/s, drafted in .*, \d+ of \d+ drafts accepted \(\d+ %\)$", first)
    assert "not drafted" in second


def test_chat_refuses_a_question_over_the_context_goes_on_and_ends_with_its_input() -> None:
    done = run("chat", *ONE, "--max-tokens", "24", text=f"{'word ' * 600}\n{PARIS}\n")
    assert done.returncode == 0
    assert "not sent: " in done.stderr
    assert ANSWER in done.stdout


def test_chat_without_a_template_says_so_before_the_first_question() -> None:
    done = run("chat", "--shape", "tiny", "--random-weights", "--device", "cpu", text="hello\n")
    assert "a plain question fails: the model has no chat template; `slipstream generate --raw` contin" in done.stdout
    assert "send a plain prompt instead of messages; /new starts over\n" in done.stderr


class Terminal:
    """A process that has a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._fd, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))  # no bar is drawn on a terminal without a size
        # As in a terminal, Ctrl-C is not ignored, whatever started the tests: a background job would hand that down.
        reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen([*COMMAND, *arguments], **streams, preexec_fn=reset)
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = WAIT) -> None:
        """Reads on until the pattern stands in what came since the last time."""
        start, until = len(self.seen), time.monotonic() + seconds
        while not re.search(pattern, self.seen[start:]):
            ready, _, _ = select.select([self._fd], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen[start:]!r}"
            self.seen += os.read(self._fd, 4096).decode(errors="replace")

    def last_line(self) -> str:
        """What the end of the process leaves on the line that the shell writes its prompt on."""
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(self._fd, 4096):
                self.seen += piece.decode(errors="replace")
        return re.split(r"[\r\n]", self.seen)[-1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal("chat", *ONE, "--max-tokens", "400")
    yield terminal
    terminal.close()


def test_chat_on_a_terminal_survives_a_stopped_answer(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("Write a long story about a dragon.\n")  # 400 tokens and more
    terminal.wait_for(r"(?s)dragon\..*[A-Za-z0-9]{2,}.*[,.]")
    terminal.process.send_signal(signal.SIGINT)  # what Ctrl-C does
    terminal.wait_for(r"(?s)\[stopped\].*> ")
    terminal.type("/new\n")
    terminal.wait_for("(?s)a new conversation.*> ")
    terminal.type(PARIS + "\n")
    terminal.wait_for(r"(?s)is Paris\..*\x1b\[2m8 tokens.*> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["serve", "--port", "0"], 0),
        (["generate", "--prompt", "Count to a thousand.", "--max-tokens", "2000"], 130),
        (["selfcheck"], 130),
    ],
)
def test_ctrl_c_while_loading_leaves_no_bar_behind(arguments: list[str], code: int) -> None:
    terminal = Terminal(*arguments)
    try:
        terminal.wait_for(r"loading: +\d+%")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.last_line().replace("\x1b[K", "").strip() == ""
        assert terminal.process.wait(WAIT) == code
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


def test_serve_says_in_a_log_how_far_it_is_and_which_shape() -> None:
    arguments = ["serve", "--port", "0", "--shape", "tiny", "--random-weights", "--draft", "off", "--device", "cpu"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("/, loading the shape tiny\n")
        while not process.stdout.readline().startswith("page"):
            assert process.poll() is None
    finally:
        process.terminate()
        _, err = process.communicate(timeout=WAIT)
    assert re.search(r"^loading: \d+\.\d [kM]B read, getting ready$", err, re.MULTILINE)


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "/no/such/model.gguf", "--prompt", "x"], "/no/such/model.gguf"),
        (["plan", "--mtp", "/no/such/head"], "/no/such/head"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "x", "--top-p", "7"], "top_p"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens"),
        (["plan", "--max-streams", "0"], "max_streams"),
        (["plan", "--device", "tpu"], "tpu"),
        (["plan", "--kv-memory=-5M"], "kv_memory"),
        (["generate"], "--prompt"),
        (["serve", "a", "b"], "llama-swap"),
        (["serve", "a", "b"], "docs/several-models.md"),
        (["serve", "--sleep-idle", "0"], "sleep_idle"),
        (["bench", "prompts", "--tokens", "0"], "tokens"),
        (["bench", "prompts", "--out", "/no/such/folder/file"], "/no/such/folder/file"),
    ],
)
def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    refused(main(arguments), capsys.readouterr().err, said)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan", "--dtype", "int3"],
        ["plan", "--kv-dtype", "fp4"],
        ["plan", "--draft", "99"],
        ["plan", "--kv-memory", "inf"],
        ["bench", "prompts", "--streams", "1,0"],
        ["bench", "prompts", "--policies", "off,,"],
    ],
)
def test_misuse_shows_the_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: slipstream" in capsys.readouterr().err


def test_an_error_in_a_real_process_shows_no_traceback() -> None:
    done = run("generate", "/no/such/model.gguf", "--prompt", "x")
    refused(done.returncode, done.stderr)
    assert done.stdout == ""


def test_spellings_known_from_elsewhere() -> None:
    def options(*arguments: str) -> ModelOptions:
        return model_options(parse(build_parser(), ["serve", *arguments]))

    assert options("--draft", "off", "--enable-mtp") == options("--draft", "adaptive") == options()
    assert options("--spec-draft-n-max", "3") == options("--max-depth", "3") != options()
    assert options("--spec-draft-p-min", "0.5") == options("--p-min", "0.5") != options()


def test_serve_needs_a_key_for_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def config() -> ServerConfig:
        return server_config(parse(build_parser(), ["serve", "--host", "0.0.0.0"]))

    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="API key"):
        config()
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "from the environment")
    assert config().api_keys == ("from the environment",)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["serve", "--help"], ["bench", "prompts", "--help"]]
)
def test_help_imports_no_array_library(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom slipstream.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: slipstream" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"slipstream {__version__}\n"
