"""Replicas of the paced model on Ray Serve, for `bench hops`: `python -m slipstream.bench.hops.paced_ray --port 8010`.

Without `--haproxy` as Ray is by default: its Python proxy carries the chunks.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from slipstream.bench.hops.paced_model import PACE, PacedModel
from slipstream.commands.text import show
from slipstream.ray.environment import HAPROXY, set_flags

if TYPE_CHECKING:
    from slipstream.ray.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Replicas on Ray that answer at a fixed pace with the time of writing."
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pace", type=float, default=PACE, help="tokens a second of each stream")
    parser.add_argument("--haproxy", action="store_true", help="Ray's HAProxy, and our routers, carry the requests")
    args = parser.parse_args()
    if not args.haproxy:
        os.environ[HAPROXY] = "0"
    set_flags()
    from slipstream.ray.settings import settings_from

    values = {"port": args.port, "replicas": args.replicas, "max_streams": 256, "log_level": "warning", "draft": "off"}
    _run(settings_from(values, own_cluster=True), PacedModel(args.pace))


def _run(settings: Settings, model: PacedModel) -> None:
    from slipstream.ray.cluster import end, start

    signals = {signal.SIGTERM, signal.SIGINT}
    try:
        start(settings, model)
        show(f"page    http://127.0.0.1:{settings.server.port}/")
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        signal.sigwait(signals)
    finally:
        end()


if __name__ == "__main__":
    main()
