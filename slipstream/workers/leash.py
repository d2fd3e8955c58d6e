"""Runs a module like `python -m`, in a process that ends when its parent does: `python leash.py MODULE ARGUMENTS...`.

The parent holds the other end of standard input, and never writes to it.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when nobody holds the other end any more
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
