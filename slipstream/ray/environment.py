"""The environment variables that Ray Serve reads when it is imported.

By default Ray's HAProxy carries the traffic instead of its Python proxy, which delays chunks (docs/scale-out.md has how
long), and replicas run without a second event loop. Variables that are set already stay as they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from slipstream.host import max_open_files

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
MIN_DRAIN = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
BUFFER = "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE"
FLAGS = {
    HAPROXY: "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",  # the router reads a conversation's key from the body
    BUFFER: str(5 << 20),  # bytes; more than the largest body by default
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # for its process to start; Ray's own 5 end it on a busy machine
    MIN_DRAIN: "5",  # seconds for HAProxy to forget a replica; Ray's own 30 make every shutdown that slow
}
RAYS_OWN_DRAIN = 30.0
CONNECTIONS, RAYS_OWN_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN", 4096
FILES_EACH, OTHER_FILES = 2.5, 200  # that HAProxy opens: it does not start where the system allows fewer


def missing_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the flags that nobody has set. None of them where Ray brings no HAProxy, or where it is switched off."""
    if sys.platform != "linux" or environment.get(HAPROXY, "1") != "1":
        return {}
    flags = FLAGS | few_connections(max_open_files())
    return {name: value for name, value in flags.items() if name not in environment}


def few_connections(max_files: int | None) -> dict[str, str]:
    """Fewer than Ray's own number, where the system allows a process only so many open files."""
    most = RAYS_OWN_CONNECTIONS if max_files is None else int((max_files - OTHER_FILES) / FILES_EACH)
    return {} if most >= RAYS_OWN_CONNECTIONS else {CONNECTIONS: str(max(1, most))}


def set_flags() -> None:
    """Before Ray Serve is imported; processes started from here inherit them."""
    os.environ |= missing_flags(os.environ)


def uses_haproxy() -> bool:
    return os.environ.get(HAPROXY) == "1"


def min_drain_seconds() -> float:
    return float(os.environ.get(MIN_DRAIN, RAYS_OWN_DRAIN)) if uses_haproxy() else 0.0


def restart_serve_run() -> None:
    """`serve run` has imported Ray Serve before it imports the application: it is run again with the flags.

    Not where it joins a cluster: there the processes of the cluster have the environment that `ray start` had.
    """
    missing = missing_flags(os.environ)
    if missing and starts_a_cluster(sys.argv, os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def starts_a_cluster(argv: list[str], environment: Mapping[str, str]) -> bool:
    is_serve_run = Path(argv[0]).name == "serve" and argv[1:2] == ["run"]
    joins = "RAY_ADDRESS" in environment or any(word.split("=")[0] in ("-a", "--address") for word in argv)
    return is_serve_run and not joins
