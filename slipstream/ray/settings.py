"""The settings of an application on Ray Serve: those of `slipstream serve`, and those of its replicas."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slipstream.cli import build_parser, model_options, server_config
from slipstream.commands.configuration import WORDS, from_values
from slipstream.commands.options import ModelOptions
from slipstream.errors import ConfigError
from slipstream.ray.environment import min_drain_seconds, uses_haproxy
from slipstream.server.service.settings import ServerConfig

EVERY_ADDRESS = "0.0.0.0"
OTHER_REQUESTS = 32  # at once, beside those that generate: health, metrics, the page
LAST_SECONDS = 5.0  # of a shutdown, after the drain


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    replicas: int = 1
    min_replicas: int | None = None  # with max_replicas: Ray decides by the number of ongoing requests
    max_replicas: int | None = None
    gpus_per_replica: float | None = None  # None: one, if there is an NVIDIA GPU here and the device is not a CPU
    cpus_per_replica: int | None = None  # of replicas that compute on a CPU: each keeps to its own cores
    affinity: bool = True  # conversations stay with their replica, if there are several

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("min_replicas", 0), ("max_replicas", 1), ("cpus_per_replica", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.autoscales and (self.min_replicas or 0) > (self.max_replicas or 1):
            raise ConfigError("min_replicas must not be more than max_replicas")

    @property
    def autoscales(self) -> bool:
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def most(self) -> int:
        return (self.max_replicas or max(1, self.min_replicas or 1)) if self.autoscales else self.replicas

    @property
    def routes(self) -> bool:
        """One replica needs nobody who chooses."""
        return self.affinity and self.most > 1


@dataclass(frozen=True, slots=True)
class Settings:
    model: ModelOptions
    server: ServerConfig
    replicas: ReplicaSettings

    def __post_init__(self) -> None:
        if 0 < self.num_gpus < 1 and self.model.memory is None:
            raise ConfigError(
                f"with gpus_per_replica={self.num_gpus} replicas share a GPU: say how much of its memory each may use, "
                "for example memory=40GB"
            )

    @property
    def max_ongoing(self) -> int:
        """The server's own queue is the limit, with its own answer to those beyond it."""
        return self.model.max_streams + self.server.queue_limit + OTHER_REQUESTS

    @property
    def shutdown_seconds(self) -> float:
        return min_drain_seconds() + self.server.drain_seconds + LAST_SECONDS

    @property
    def num_cores(self) -> int | None:
        """That a replica keeps to; None: it may use all."""
        return None if self.num_gpus else self.replicas.cpus_per_replica

    @property
    def num_gpus(self) -> float:
        if self.replicas.gpus_per_replica is not None:
            return self.replicas.gpus_per_replica
        on_gpu = self.model.device != "cpu" and self.model.runner != "mlx" and shutil.which("nvidia-smi") is not None
        return 1.0 if on_gpu else 0.0


def settings_from(values: Mapping[str, Any], *, own_cluster: bool = False) -> Settings:
    """``values``: as in a Serve config file, or texts as `serve run` has them. Raises ConfigError.

    ``own_cluster``: Ray is to listen where the settings say; otherwise its HAProxy listens on every address.
    """
    names = {field.name for field in fields(ReplicaSettings)}
    own = {name: _converted(name, value) for name, value in values.items() if name in names}
    serve = {name: value for name, value in values.items() if name not in names}
    if uses_haproxy() and not own_cluster:
        serve["host"] = EVERY_ADDRESS  # so an API key is demanded
    args = from_values(build_parser(), ("serve",), serve)
    return Settings(model_options(args), server_config(args), ReplicaSettings(**own))


def _converted(name: str, value: Any) -> Any:
    if name == "affinity":
        return value if isinstance(value, bool) else _switch(name, value)
    convert = float if name == "gpus_per_replica" else int
    try:
        return None if value is None else convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a number, not {value!r}") from error


def _switch(name: str, value: Any) -> bool:
    if str(value).lower() not in WORDS:
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return WORDS[str(value).lower()]
