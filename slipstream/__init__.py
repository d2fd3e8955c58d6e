"""Slipstream: an LLM inference server in which every stream of the batch drafts with the model's own MTP head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.llm import LLM, Output
    from slipstream.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "Output", "SamplingParams"]

_HOMES = {
    "AsyncEngine": "slipstream.engine.async_engine",
    "LLM": "slipstream.llm",
    "Output": "slipstream.llm",
    "SamplingParams": "slipstream.sampling",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: `import slipstream.engine` brings in no array library."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
