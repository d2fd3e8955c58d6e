"""A cluster of one machine in a process of its own: a file and settings as arguments, then lines on standard input.

`scale N` changes the number of replicas; the end of the input drains. One engine fails when the file appears.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from faulty_loading import FaultyLoading

from slipstream.ray.environment import set_flags

set_flags()

from slipstream.ray.cluster import deploy, drain, end, start  # noqa: E402  Ray reads the flags when it is imported
from slipstream.ray.settings import settings_from  # noqa: E402


def main(fault: str, words: list[str]) -> None:
    settings = settings_from(dict(word.split("=", 1) for word in words), own_cluster=True)
    load = FaultyLoading(settings.model, Path(fault))
    try:
        start(settings, load)
        print("ready", flush=True)
        for line in sys.stdin:
            settings = replace(settings, replicas=replace(settings.replicas, replicas=int(line.split()[1])))
            deploy(settings, load)
            print("scaled", flush=True)
        drain(settings)
        print("drained", flush=True)
    finally:
        end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
