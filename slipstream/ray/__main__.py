"""`python -m slipstream.ray model=... replicas=2 port=8000`: a cluster on this machine that drains before it ends.

`serve run` cuts running answers when it gets SIGTERM. This removes the application first, while the proxy still carries
the answers that are being written, then the cluster.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from slipstream.errors import ConfigError, SlipstreamError, printable
from slipstream.ray.environment import set_flags
from slipstream.server.http.lifecycle import shown_host


def main(words: Sequence[str]) -> int:
    set_flags()
    try:
        return run(dict(_pair(word) for word in words))
    except SlipstreamError as error:
        print(f"slipstream: {printable(str(error))}", file=sys.stderr)
        return 1


def _pair(word: str) -> tuple[str, str]:
    name, separator, value = word.partition("=")
    if not separator:
        raise ConfigError(f"settings are written like replicas=2, not {word!r}")
    return name, value


def run(values: dict[str, str]) -> int:
    """Until a signal; a second one ends it without waiting."""
    from slipstream.ray.cluster import drain, end, start
    from slipstream.ray.settings import settings_from

    settings, ended = settings_from(values, own_cluster=True), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            sys.exit(1)
        ended.set()

    try:
        start(settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        print(f"page    http://{shown_host(settings.server.host)}:{settings.server.port}/", file=sys.stderr)
        while not ended.wait(1.0):
            pass
        print("draining: no new requests; running answers are finished", file=sys.stderr)
        drain(settings)
    finally:
        end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
