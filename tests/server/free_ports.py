"""Ports for programs that cannot be told to take any."""

from __future__ import annotations

import random
import socket

# Others would take one before the program does: above what Ray's workers use (10002 to 19999), below what Ray Serve's
# replicas (from 30000) and outgoing connections (from 32768) use.
RANGE = range(20_000, 30_000)


def free_port() -> int:
    for port in random.SystemRandom().sample(RANGE, 200):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
