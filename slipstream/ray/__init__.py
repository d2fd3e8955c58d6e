"""Replicas on Ray Serve: `serve run slipstream.ray:app`; with settings `slipstream.ray:build`: see docs/scale-out.md.

Every replica is the ASGI application of `slipstream serve` over an engine of its own. Nothing else in the package
imports this one; it needs `pip install 'slipstream[ray]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.ray.environment import restart_serve_run

if TYPE_CHECKING:
    from ray.serve import Application

restart_serve_run()


def build(values: dict[str, Any]) -> Application:
    """The application for Ray Serve. ``values``: settings of `slipstream serve` and of the replicas, by name."""
    from slipstream.ray.application import application
    from slipstream.ray.settings import settings_from

    return application(settings_from(values))


def __getattr__(name: str) -> Any:
    """`app`: built when it is asked for, from the environment and slipstream.toml."""
    if name == "app":
        return build({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
