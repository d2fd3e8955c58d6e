"""What is to be measured on a large GPU, as one list of commands.

`python bench/gpu.py PART --seconds 580 --out FOLDER` runs the entries of a part one after the other. What each prints
becomes a file, and what the benchmarks measure is in results.jsonl. Entries that are not expected to fit into the
seconds that are left are named and left out: start again with `--from NAME`. `--list` shows all of them. They need
about 141 GB of device memory; nothing is installed or fetched.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
NO_TESTS = 5  # pytest's exit status where all tests of a file were left out
PATIENCE = 2.0  # times the expected seconds: then an entry is ended


@dataclass(frozen=True, slots=True)
class Entry:
    """``seconds``: expected; about 25 to load and compile, and the tokens at the speed of docs/benchmarks.md."""

    name: str
    seconds: int
    command: str  # for the interpreter; of tests: of all their files, which run side by side

    @property
    def is_bench(self) -> bool:
        return self.command.startswith(BENCH)

    def commands(self, out: Path) -> list[list[str]]:
        words = [sys.executable, *shlex.split(self.command)]
        if self.is_bench:
            return [[*words, "--out", str(out / "results.jsonl")]]
        if not self.command.startswith(TESTS):
            return [words]
        folders = [word for word in words if (ROOT / word).is_dir()]
        files = [word for word in words if word.startswith("tests/") and word not in folders]
        files += [str(path.relative_to(ROOT)) for each in folders for path in sorted((ROOT / each).glob("test_*.py"))]
        rest = [word for word in words if not word.startswith("tests/")]
        return [[*rest, file] for file in files]


def streams(
    name: str, model: str, modes: str = "off,3,adaptive", counts: str = "1,4,16,64", seconds: int = 80
) -> Entry:
    return Entry(name, seconds, f"{BENCH} streams {model} --streams {counts} --modes {modes} {SHORT}")


PARTS: dict[str, list[Entry]] = {
    # First: what was only compiled and interpreted so far must be right on a GPU.
    "right": [
        Entry(
            "tests", 120,
            f"{TESTS} -m 'not exhaustive' tests/runners/cuda tests/conformance/test_resident.py "
            "tests/conformance/test_resident_keeps.py tests/conformance/test_resident_quantized.py "
            "tests/conformance/test_cuda.py",
        ),
    ],
    # One entry for each goal that is still open or was not seen yet (docs/LOG.md, 243 to 253), in a call.
    "goals": [
        streams("27b-64", f"{DENSE} {HIGH}", "off,adaptive", "64", 50),
        streams("27b-fp8-activations-64", f"{DENSE} {HIGH} {FP8}", "off,adaptive", "16,64", 60),
        streams("35b-a3b-64", f"{SPARSE} {HIGH}", "off,adaptive", "64", 50),
        Entry(
            "8k-prompts", 60,
            f"{BENCH} streams {DENSE} {HIGH} --streams 1,8 --modes adaptive --prompt 8192 --new 128 --warm 32",
        ),
        Entry("prefill-16k", 60, f"{BENCH} prefill {DENSE} --lengths 16384 --streams 8"),
        Entry("prefill-16k-fp8", 60, f"{BENCH} prefill {DENSE} {FP8} --lengths 16384 --streams 8"),
        # A card of 24 GB.
        Entry(
            "27b-24gb", 90,
            f"{BENCH} streams {DENSE} {HIGH} --stored-as UD-Q4_K_XL --memory 24GiB --max-context 16384 --streams 4 "
            "--modes off,adaptive --prompt 16000 --new 256 --warm 32",
        ),
        Entry("27b-step-UD-Q4_K_XL", 40, f"{BENCH} step {DENSE} --stored-as UD-Q4_K_XL --rows 1 --depths 0,3"),
        Entry("32k-step", 80, f"{BENCH} step {DENSE} --rows 1,8 --depths 0,3 --context 32768"),
    ],
    "streams": [
        streams("27b", f"{DENSE} {HIGH}"),
        streams("27b-fp8", f"{DENSE} {HIGH} --dtype fp8"),
        streams("27b-fp8-activations", f"{DENSE} {HIGH} {FP8}"),
        streams("35b-a3b", f"{SPARSE} {HIGH}"),
        streams("27b-low", f"{DENSE} {LOW}", "off,1,adaptive", "1,16,64", 70),
        streams("27b-fp8-low", f"{DENSE} {LOW} --dtype fp8", "off,1,adaptive", "1,16,64", 70),
        streams("35b-a3b-low", f"{SPARSE} {LOW}", "off,1,adaptive", "1,16,64", 70),
        streams("27b-states-16", f"{DENSE} {HIGH} --state-dtype float16", counts="1,64", seconds=60),
    ],
    "products": [
        Entry("codes", 170, f"{REPORTS}/container_report.py --shapes 2"),
        Entry("codes-tiles", 200, f"{REPORTS}/container_report.py --sweep --shapes 1"),
        Entry("fp8", 200, f"{REPORTS}/fp8_report.py --seconds 150"),
        Entry("gdn-chunks", 40, f"{REPORTS}/gdn_chunks_report.py"),
    ],
    "files": [
        *(
            streams(f"27b-{stored}", f"{DENSE} {HIGH} --stored-as {stored}", "off,adaptive", seconds=65)
            for stored in ("UD-Q4_K_XL", "IQ4_XS", "INT4_32", "FP4_16", "INT8_128")
        ),
        streams("35b-a3b-Q4_K_M", f"{SPARSE} {HIGH} --stored-as Q4_K_M", "off,adaptive", seconds=65),
        *(
            Entry(f"27b-step-{stored}", 40, f"{BENCH} step {DENSE} --stored-as {stored} --rows 1 --depths 0,3")
            for stored in ("INT4_32", "INT8_128")
        ),
    ],
    "long": [
        Entry("prefill", 70, f"{BENCH} prefill {DENSE} --lengths 1024,8192 --streams 8"),
        Entry("32k", 170, f"{BENCH} streams {DENSE} {HIGH} --streams 1,8 --modes off,3,adaptive {LONG}"),
        Entry("32k-kv-fp8", 150, f"{BENCH} streams {DENSE} {HIGH} --kv-dtype fp8 --streams 8 --modes off,3 {LONG}"),
        Entry("128k-step", 60, f"{BENCH} step {DENSE} --rows 1 --depths 0,3 --context 131072"),
        Entry(
            "128k", 110,
            f"{BENCH} streams {DENSE} {HIGH} --streams 1 --modes off,adaptive --prompt 131072 --new 64 --warm 16",
        ),
    ],
}  # fmt: skip


def run(entry: Entry, out: Path, seconds: float) -> str:
    """What became of it."""
    began = time.monotonic()
    limit = min(PATIENCE * entry.seconds, seconds)

    def run_one(command: list[str]) -> tuple[str, int | None]:
        return run_command(command, limit - (time.monotonic() - began))

    with (out / f"{entry.name}.txt").open("w") as file:
        file.write(f"python {entry.command}\n")
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
            codes = []
            for said, code in pool.map(run_one, entry.commands(out)):
                file.write(said)
                file.flush()
                codes.append(code)
    if None in codes:
        return f"ended after {limit:.0f} s"
    failed = [str(code) for code in codes if code not in (0, NO_TESTS)]
    return f"{'failed (' + ', '.join(failed) + ')' if failed else 'done'} in {time.monotonic() - began:.0f} s"


def run_command(command: list[str], seconds: float) -> tuple[str, int | None]:
    """What it printed, and its exit status; None: it ran out of time."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / REPORTS}", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as file:
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env, timeout=max(0.01, seconds)
            ).returncode
        file.seek(0)
        return file.read().decode(errors="replace"), code


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
        left = end - time.monotonic()
        fate = run(entry, options.out, left) if entry.seconds <= left else "left out: too little time"
        print(f"{entry.name}: {fate}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
