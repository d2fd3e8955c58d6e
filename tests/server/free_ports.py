"""Ports for programs that cannot be told to take any."""

from __future__ import annotations

import random
import socket

# Below those that the system gives to outgoing connections, which would take one before the program does.
RANGE = range(15_000, 29_000)


def free_port() -> int:
    for port in random.SystemRandom().sample(RANGE, 200):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
