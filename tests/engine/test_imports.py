"""The engine is pure Python: importing all of it brings in no array library."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import slipstream.engine
for module in pkgutil.iter_modules(slipstream.engine.__path__):
    importlib.import_module(f"slipstream.engine.{module.name}")
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("slipstream.")}
assert rooms == {"engine", "cache", "speculate", "config", "errors", "sampling"}, rooms
found = {"torch", "numpy", "mlx"} & set(sys.modules)
assert not found, found
"""


def test_no_array_library_is_imported() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
