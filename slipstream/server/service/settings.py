"""The server's options: frozen, validated once."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from slipstream.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # any of them opens every path; several tell clients apart
    metrics_without_key: bool = False
    allowed_hosts: tuple[str, ...] = ()  # host names clients may use, besides localhost and IP addresses
    cors_origins: tuple[str, ...] = ()  # whose pages may read our answers; "*": all
    names: tuple[str, ...] = ()  # the names clients may use, besides the model's own; empty: any
    strict: bool = False  # unknown fields are errors
    queue_limit: int = 256  # requests that may wait, besides those that run
    max_body: int = 4 << 20  # bytes
    max_json_depth: int = 64  # schemas nest
    body_seconds: float = 30.0  # for the body of a request to arrive
    keep_alive_seconds: float = 10.0  # of silence in a stream before a keep-alive
    drain_seconds: float = 30.0  # that running requests get after SIGTERM
    max_connections: int = 1024  # more get 503
    write_seconds: float = 60.0  # after which a client that does not read is closed
    log_level: str = "info"
    log_format: str = "text"
    sleep_idle_seconds: float | None = None  # without requests until the model is freed; None: never

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        for name, low, high in (
            ("queue_limit", 0, 1 << 20),
            ("max_body", 1 << 10, 1 << 30),
            ("max_json_depth", 4, 512),
            ("max_connections", 1, 1 << 20),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be from {low} to {high}, not {getattr(self, name)}")
        for name in ("body_seconds", "keep_alive_seconds", "drain_seconds", "write_seconds"):
            if not 0.0 < getattr(self, name) <= 86400.0:
                raise ConfigError(f"{name} must be more than 0 and at most a day, not {getattr(self, name)}")
        for name, known in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"an origin is written like https://example.org or *, not {origin!r}")
        if self.sleep_idle_seconds is not None and not self.sleep_idle_seconds > 0.0:
            raise ConfigError(f"sleep_idle_seconds must be more than 0, not {self.sleep_idle_seconds}")
        self._check_keys()

    def _check_keys(self) -> None:
        for key in self.api_keys:
            if not (key.isascii() and key.isprintable() and key):
                raise ConfigError("the API key must be printable ASCII and not empty")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(f"{self.host} can be reached from other machines: that needs an API key (--api-key)")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
