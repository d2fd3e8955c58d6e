"""Puts the worker of these tests on the import path, which worker processes inherit."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
