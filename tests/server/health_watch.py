"""Asks a server's `/health` every 50 ms until its input ends, then writes how long each answer took, as JSON.

A process of its own: what it measures is the server, not the tests beside it.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

WAIT = 300.0


def main() -> None:
    port, seconds = int(sys.argv[1]), []
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        began = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        seconds.append(time.monotonic() - began)
        connection.close()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
