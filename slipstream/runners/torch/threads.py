"""Threads and cores: our kernels have threads of their own, one a core."""

from __future__ import annotations

import threading

import torch

_local = threading.local()


def keep_to_this_thread() -> None:
    """From now on PyTorch's operations stay on the thread that calls this.

    They are small compared with the kernels, and PyTorch's helpers wait by spinning, on cores that the kernels need.
    """
    if not getattr(_local, "kept", False):
        torch.set_num_threads(1)  # of threads that have not computed yet, too; those that have keep theirs
        _local.kept = True
