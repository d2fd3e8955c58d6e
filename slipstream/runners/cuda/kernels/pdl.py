"""Programmatic dependent launch (PDL): a kernel is launched and set up while the one before it still runs.

Every kernel that is launched with ``pdl_options`` calls ``wait_for_previous`` before it reads or writes anything that
another kernel writes or reads, and before it may return: the wait ends with the previous kernel, which waited for the
one before it. Needs compute capability 9.0; elsewhere kernels follow each other as usual.

Before the wait a kernel may read constant data: weights. A matrix product calls ``launch_dependents`` only after its
own wait; so a kernel that follows a product may also read, before its wait, the data written before that product: where
the step's rows lie, and caches as earlier steps left them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.runners.cuda.kernels.gpus import gpu


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch on this device."""
    return {"launch_pdl": True} if gpu(device).has_pdl else {}


def uses_pdl(_semantic: Any = None) -> tl.constexpr:
    """Inside a kernel, when it is compiled: whether it is launched with PDL. Not so in the interpreter."""
    return tl.constexpr(_semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False))


uses_pdl.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton then calls it with its own ``_semantic``


@triton.jit
def launch_dependents():
    """The next kernel's programs may start once all programs of this one have called it, or ended."""
    if uses_pdl():
        gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Returns when the previous kernel has ended and its writes are visible."""
    if uses_pdl():
        gdc_wait()


@triton.jit
def launch_dependents_and_wait():
    launch_dependents()
    wait_for_previous()
