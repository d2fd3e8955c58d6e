"""The flags of `serve` alone: address, limits, who may ask, what is logged."""

from __future__ import annotations

import argparse

from slipstream.commands.arguments import num_bytes
from slipstream.commands.flags import flag
from slipstream.server.service.settings import LOG_FORMATS, LOG_LEVELS


def server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    flag(
        group,
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen on; another than loopback needs --api-key",
    )
    flag(group, "--port", type=int, default=8000, metavar="N", help="to listen on; 0: any free one")
    flag(
        group,
        "--served-name",
        action="append",
        default=[],
        metavar="NAME",
        shown="any",
        help="a name that clients must use, besides the model's own; may be repeated",
    )
    flag(group, "--strict", action="store_true", help="refuse requests with unknown fields")
    flag(group, "--queue-limit", type=int, default=256, metavar="N", help="requests that may wait; more get 429")
    flag(group, "--max-connections", type=int, default=1024, metavar="N", help="at once; more get 503")
    flag(
        group,
        "--write-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="after which a client that reads nothing is closed",
    )
    flag(group, "--max-body", type=num_bytes, default=4 << 20, metavar="SIZE", shown="4MiB", help="of one request")
    flag(
        group,
        "--keep-alive",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="of silence in a stream before a sign of life",
    )
    flag(
        group,
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that running requests get after SIGTERM",
    )
    flag(
        group,
        "--sleep-idle",
        type=float,
        metavar="SECONDS",
        shown="never",
        help="without requests until the model's memory is freed; the next request loads it again",
    )


def access_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    flag(
        group,
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        shown="none",
        help="required on every path but /health and /ready; better in SLIPSTREAM_API_KEY, which no list of processes "
        "shows; may be repeated, then each is a client of its own",
    )
    flag(
        group,
        "--metrics-without-key",
        action="store_true",
        help="/metrics needs no key, for scrapers that cannot send one",
    )
    flag(
        group,
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        shown="none",
        help="whose pages may call this server, e.g. https://example.org; *: all; may be repeated",
    )
    flag(
        group,
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        shown="localhost, this machine's name, any IP address",
        help="a host name that clients may call this server by; may be repeated",
    )


def log_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    flag(group, "--log-level", default="info", choices=LOG_LEVELS, help="info: a line a request")
    flag(group, "--log-format", default="text", choices=LOG_FORMATS, help="json: one object a line")
