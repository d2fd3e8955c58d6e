"""How a benchmark is reported: a JSON line, a file under bench/results/, the machine it ran on.

Results name the device, the processor and versions; never a host, a user or a path.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from slipstream import __version__
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.engine.contract import RunnerInfo
from slipstream.errors import ConfigError
from slipstream.host import available_threads, cpu_name

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def host(options: ModelOptions) -> dict[str, object]:
    return {"device": options.backend.device.name, "cpu": cpu_name(), "cores": available_threads()}


def versions(options: ModelOptions) -> dict[str, str]:
    library = options.backend.name
    return {"slipstream": __version__, library: version(library), "python": platform.python_version()}


def simulated(options: ModelOptions) -> str:
    """A label for everything that people read; empty if nothing is simulated."""
    rates = "/".join(f"{rate:g}" for rate in options.simulate_acceptance)
    return f"ACCEPTANCE SIMULATED at {rates}" if rates else ""


def title(options: ModelOptions, what: str) -> str:
    weights = ", random weights" if options.shape else ""
    return f"{_without_folders(options.model_name)}{weights} on {options.backend.device.name}: {what}"


def headline(options: ModelOptions, info: RunnerInfo) -> str:
    """What runs where, what is simulated if the runner's own note does not say it, and why no stream drafts."""
    label = simulated(options)
    what = info.note if label in info.note else f"{info.note}, {label}"
    return title(options, what if info.max_depth else f"{what}\nnothing is drafted: {info.why_no_draft}")


def clause(label: str, before: str = ", ") -> str:
    """A label at the end of a line, if there is one."""
    return before + label if label else ""


def check_writable(options: ReportOptions) -> None:
    """Said before the measuring, not after it."""
    for path in filter(None, (options.out, options.plot)):
        try:
            Path(path).open("a").close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    if options.save is not None:
        _results_folder(options.save)


def write_report(what: str, model: ModelOptions, options: ReportOptions, results: Mapping[str, object]) -> None:
    """The JSON line, and the same where it is to be kept."""
    report = {
        "bench": what,
        "model": _without_folders(model.model_name),
        "random_weights": model.random_weights,
        "simulated_acceptance": list(model.simulate_acceptance) or None,
        **results,
        "host": host(model),
        "command": shlex.join(["slipstream", *map(_without_folders, options.command)]),
        "versions": versions(model),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    line = json.dumps(report)
    print(line, flush=True)
    if options.out:
        with Path(options.out).open("a") as file:
            print(line, file=file)
    if options.save is not None:
        _save(report, options.save)


def _save(report: dict[str, object], folder: str) -> None:
    words = (report["bench"], report["model"], report["host"]["device"])  # type: ignore[index]
    name = "-".join(re.sub(r"[^a-z0-9.]+", "-", str(word).lower()).strip("-") for word in words)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = _results_folder(folder) / f"{name}-{stamp}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"saved as {path.name}", file=sys.stderr)


def _results_folder(folder: str) -> Path:
    """Empty: the repository's own."""
    path = Path(folder) if folder else RESULTS
    if not folder and not (RESULTS.parents[1] / "pyproject.toml").exists():
        raise ConfigError("--save without a folder works in a checkout of the repository only: name a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _without_folders(word: str) -> str:
    """Paths are the reader's business only by their last part; hub ids stay whole."""
    path = Path(word)
    return path.name if path.is_absolute() or (len(path.parts) > 1 and path.exists()) else word
