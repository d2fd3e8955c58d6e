"""What is to be measured on a large GPU, as one list of commands.

`python bench/gpu.py PART --seconds 580 --out FOLDER` runs the entries of a part one after the other. What each prints
becomes a file, and what the benchmarks measure is in results.jsonl. Entries that no longer fit into the seconds are
named and left out: start again with `--from NAME`. `--list` shows all of them. They need about 141 GB of device memory;
nothing is installed or fetched.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCH, TESTS = "-m slipstream.cli bench", "-m pytest -q -p no:cacheprovider"
HIGH, LOW = "--simulate-acceptance 0.85,0.72,0.60", "--simulate-acceptance 0.45,0.20,0.09"
DENSE, SPARSE = "--shape qwen3.5-27b --random-weights", "--shape qwen3.5-35b-a3b --random-weights"
SHORT = "--prompt 128 --new 256 --warm 96"
FP8 = "--dtype fp8 --fp8-activations on"
LONG = "--prompt 32768 --new 128 --warm 32"
REPORTS = "tests/runners/cuda"


@dataclass(frozen=True, slots=True)
class Entry:
    """``seconds``: after which it is ended, loading and compiling included: estimates, never timed."""

    name: str
    seconds: int
    command: str  # for the interpreter

    @property
    def is_bench(self) -> bool:
        return self.command.startswith(BENCH)


def streams(
    name: str, model: str, modes: str = "off,3,adaptive", counts: str = "1,4,16,64", seconds: int = 150
) -> Entry:
    return Entry(name, seconds, f"{BENCH} streams {model} --streams {counts} --modes {modes} {SHORT}")


PARTS: dict[str, list[Entry]] = {
    # First: what was only compiled and interpreted so far must be right on a GPU.
    "right": [
        Entry("kernels", 400, f"{TESTS} tests/runners/cuda -m 'not exhaustive'"),
        Entry("steps", 170, f"{TESTS} tests/conformance/test_resident.py tests/conformance/test_cuda.py"),
    ],
    "streams": [
        streams("27b", f"{DENSE} {HIGH}"),
        streams("27b-fp8", f"{DENSE} {HIGH} --dtype fp8"),
        streams("27b-fp8-activations", f"{DENSE} {HIGH} {FP8}"),
        streams("35b-a3b", f"{SPARSE} {HIGH}"),
        streams("27b-low", f"{DENSE} {LOW}", "off,1,adaptive", "1,16,64"),
        streams("27b-fp8-low", f"{DENSE} {LOW} --dtype fp8", "off,1,adaptive", "1,16,64"),
        streams("35b-a3b-low", f"{SPARSE} {LOW}", "off,1,adaptive", "1,16,64"),
        streams("27b-states-16", f"{DENSE} {HIGH} --state-dtype float16", counts="1,64", seconds=110),
    ],
    "products": [
        Entry("codes", 170, f"{REPORTS}/container_report.py --shapes 2"),
        Entry("codes-tiles", 200, f"{REPORTS}/container_report.py --sweep --shapes 1"),
        Entry("fp8", 200, f"{REPORTS}/fp8_report.py --seconds 150"),
    ],
    "files": [
        *(
            streams(f"27b-{stored}", f"{DENSE} {HIGH} --stored-as {stored}", "off,adaptive", seconds=140)
            for stored in ("UD-Q4_K_XL", "IQ4_XS", "INT4_32", "FP4_16", "INT8_128")
        ),
        streams("35b-a3b-Q4_K_M", f"{SPARSE} {HIGH} --stored-as Q4_K_M", "off,adaptive", seconds=140),
        # A card of 24 GB.
        Entry(
            "27b-24gb", 150,
            f"{BENCH} streams {DENSE} {HIGH} --stored-as UD-Q4_K_XL --memory 24GiB --max-context 16384 --streams 4 "
            "--modes off,adaptive --prompt 16000 --new 256 --warm 32",
        ),
        Entry("27b-step", 90, f"{BENCH} step {DENSE} --stored-as UD-Q4_K_XL --rows 1 --depths 0"),
    ],
    "long": [
        Entry("prefill", 150, f"{BENCH} prefill {DENSE} --lengths 1024,8192,16384 --streams 8"),
        Entry("prefill-fp8", 150, f"{BENCH} prefill {DENSE} {FP8} --lengths 16384 --streams 8"),
        Entry(
            "8k-prompts", 120,
            f"{BENCH} streams {DENSE} {HIGH} --streams 1,8 --modes adaptive --prompt 8192 --new 128 --warm 32",
        ),
        Entry("32k", 150, f"{BENCH} streams {DENSE} {HIGH} --streams 1,8 --modes off,3,adaptive {LONG}"),
        Entry("32k-kv-fp8", 150, f"{BENCH} streams {DENSE} {HIGH} --kv-dtype fp8 --streams 8 --modes off,3 {LONG}"),
        Entry(
            "128k", 150,
            f"{BENCH} streams {DENSE} {HIGH} --streams 1 --modes off,adaptive --prompt 131072 --new 64 --warm 16",
        ),
    ],
}  # fmt: skip


def command_of(entry: Entry, out: Path) -> list[str]:
    words = [sys.executable, *shlex.split(entry.command)]
    return [*words, "--out", str(out / "results.jsonl")] if entry.is_bench else words


def run(entry: Entry, out: Path) -> str:
    """What became of it."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / REPORTS}", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with (out / f"{entry.name}.txt").open("wb") as file:
        file.write(f"python {entry.command}\n".encode())
        file.flush()
        try:
            code = subprocess.run(
                command_of(entry, out), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env, timeout=entry.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ended after its {entry.seconds} s"
    return f"{'done' if code == 0 else f'failed ({code})'} in {time.monotonic() - began:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS, nargs="?")
    parser.add_argument("--seconds", type=float, default=580.0, help="for all of it (default: 580)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder (default: gpu-results)")
    parser.add_argument("--from", dest="first", metavar="NAME", help="begin with this entry")
    parser.add_argument("--list", action="store_true", help="only show the entries")
    options = parser.parse_args(arguments)
    if options.list or options.part is None:
        for part, entries in PARTS.items():
            print(part, *(f"  {each.name} ({each.seconds} s): python {each.command}" for each in entries), sep="\n")
        return 0
    entries = PARTS[options.part]
    names = [each.name for each in entries]
    if options.first is not None and options.first not in names:
        parser.error(f"{options.part} has the entries {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    for entry in entries[names.index(options.first) if options.first else 0 :]:
        left = entry.seconds > end - time.monotonic()
        print(f"{entry.name}: {'left out: too little time' if left else run(entry, options.out)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
