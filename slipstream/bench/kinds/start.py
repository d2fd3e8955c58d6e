"""`slipstream bench start`: seconds from the start of a process to its first token.

The process is `slipstream generate` with one short prompt and one token to generate: interpreter, imports, weights,
calibration of the depth policy and the first step are all in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

from slipstream.bench.harness.report import check_writable, title, write_report
from slipstream.commands.configuration import PREFIX
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import shown
from slipstream.errors import ConfigError

PROMPT = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class StartSettings:
    repeats: int = 2  # the first may meet cold files
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.timeout <= 0:
            raise ConfigError("repeats and timeout must be more than 0")


def start(options: ModelOptions, settings: StartSettings, to: ReportOptions) -> int:
    check_writable(to)
    options.open()  # errors of opening are raised here, and the default model is fetched before the clock runs
    seconds = [_first_token(options, settings.timeout) for _ in shown(range(settings.repeats), "start")]
    print(title(options, f"first token {' '.join(f'{each:.2f}' for each in seconds)} s after the process started"))
    write_report("start", options, to, {"seconds": [round(each, 3) for each in seconds]})
    return 0


def _first_token(options: ModelOptions, timeout: float) -> float:
    command = [sys.executable, "-m", "slipstream.cli", "generate", *options.arguments()]
    command += ["--json", "--prompt", PROMPT, "--max-tokens", "1", "--config", ""]
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment())
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            line = _first_line(process)
            seconds = time.perf_counter() - began
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.communicate()
        if not line:
            errors.seek(0)
            raise ConfigError(f"the process gave no token in {seconds:.0f} s: {errors.read().strip() or 'no word why'}")
    assert len(json.loads(line)["token_ids"]) == 1
    return seconds


def _environment() -> dict[str, str]:
    """Without settings of the model: the arguments say them all."""
    settings = {PREFIX + name.upper() for name in ModelOptions.__slots__}
    return {name: value for name, value in os.environ.items() if name not in settings}


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
