"""Before the first step: the kernels that steps need, compiled on all cores at once instead of one by one.

Steps are captured and never replayed, so the device does nothing; each launch that would compile is recorded and
skipped. A failure here costs time only: a kernel that was not compiled ahead is compiled when it is first launched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.host import available_threads
from slipstream.runners.cuda.graphs import Graphs
from slipstream.runners.cuda.kernels.matmul.linear import padded
from slipstream.runners.cuda.kernels.matmul.linear_quantized import compiled_for
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix
from slipstream.runners.cuda.kernels.quant.fp8 import Fp8Matrix
from slipstream.runners.cuda.layout import Layout
from slipstream.runners.cuda.program import CudaProgram
from slipstream.runners.torch.models.layers import Layers, Sequential

PATIENCE = 1.0  # seconds after which the log explains the wait: reading compiled kernels takes less
ANY_GRID = (1, 1, 1)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as one launch would compile it."""

    function: Any  # Triton's JITFunction
    specialization: str

    def compile(self) -> None:
        """Compile it, build its launcher and load it. To ask for a grid does the last two, and launches nothing."""
        self.function.preload(self.specialization)[ANY_GRID]


def attempt(action: Callable[[], object]) -> Exception | None:
    """Why it failed, if it did.

    The one place that takes any exception. Triton's hooks are no public interface, and below them a compiler, ptxas,
    a C compiler and the driver each raise their own kind. Nothing depends on the outcome: a launch with a real
    error raises it again.
    """
    try:
        action()
    except Exception as error:
        return error
    return None


def hash_triton() -> threading.Thread:
    """Triton keys its caches by a hash of itself, once a process: started before the first kernel needs it."""
    action = partial(attempt, lambda: triton.runtime.cache.triton_key())
    thread = threading.Thread(target=action, name="hash-triton", daemon=True)
    thread.start()
    return thread


def warm_up(program: CudaProgram, graphs: Graphs, layouts: Iterable[Layout]) -> None:
    """Compile the kernels of steps of these layouts. Without captured steps there is nothing to do ahead."""
    if graphs.enabled and (error := attempt(partial(_warm_up, program, graphs, layouts))):
        log.warning("kernels are compiled one by one: the warm-up failed", exc_info=error)


def _warm_up(program: CudaProgram, graphs: Graphs, layouts: Iterable[Layout]) -> None:
    short = program.with_layers(one_of_each(program.decoder.layers))
    with recorded() as launches:
        for layout in distinct(layouts):
            graphs.dry_run(partial(short.step, layout))
    compile_together(launches, partial(torch.cuda.set_device, torch.cuda.current_device()))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches of this thread that need a kernel which is not compiled yet, each once. They are skipped."""
    launches: dict[Hashable, Launch] = {}
    runtime = triton.knobs.runtime
    thread, before = threading.get_ident(), runtime.jit_cache_hook

    def record(*, key: str, fn: Any, compile: dict[str, Any], **others: Any) -> bool | None:
        if threading.get_ident() != thread:
            return before(key=key, fn=fn, compile=compile, **others) if before else None
        launches.setdefault((fn.module, fn.name, key), Launch(fn.jit_function, compile["specialization_data"]))
        return True

    found: list[Launch] = []
    runtime.jit_cache_hook = record
    try:
        yield found
    finally:
        runtime.jit_cache_hook = before
        found += launches.values()


def compile_together(launches: list[Launch], begin_thread: Callable[[], object]) -> None:
    if not launches:
        return
    num_threads = min(len(launches), available_threads())
    with ThreadPoolExecutor(num_threads, "compile", begin_thread) as pool:
        futures = [pool.submit(launch.compile) for launch in launches]
        if wait(futures, PATIENCE).not_done:
            log.warning("compiling %d kernels for this GPU: they are kept for the next start", len(launches))
    # A kernel that only its thread could not load is loaded here.
    again = [launch for launch, future in zip(launches, futures, strict=True) if future.exception() is not None]
    failed = [error for launch in again if (error := attempt(launch.compile)) is not None]
    if failed:
        log.warning("%d of %d kernels were not compiled ahead, the first: %r", len(failed), len(launches), failed[0])


def distinct(layouts: Iterable[Layout]) -> list[Layout]:
    """One of those that need the same kernels, as far as sizes show it."""
    found: dict[Hashable, Layout] = {}
    for layout in layouts:
        found.setdefault(_needs(layout), layout)
    return list(found.values())


def _needs(layout: Layout) -> Hashable:
    shape = layout.shape
    variant = (shape.tile_size, shape.context, shape.has_prompts, shape.plain, shape.feeds_head, shape.masked)
    sizes = (shape.num_rows, shape.num_tokens, shape.num_samples, shape.num_tiles, *layout.pass_rows)
    multiplied = (shape.num_tokens, shape.num_samples, *layout.pass_rows)
    return variant, tuple(_distinction(size) for size in sizes), tuple(compiled_for(size) for size in multiplied)


def _distinction(size: int) -> Hashable:
    """The differences between sizes for which attention and Triton compile another kernel."""
    return padded(size), size == 1, size % 16 == 0


def one_of_each(layers: Layers) -> Layers:
    """One layer of each kind: others launch the same kernels. The first comes twice: after another it may differ."""
    if not isinstance(layers, Sequential):
        return layers
    kinds = list({(type(layer.mixer), type(layer.mlp), stored_as(layer)): layer for layer in layers.layers}.values())
    return replace(layers, layers=[*kinds, kinds[0]])


def stored_as(part: object) -> tuple[Hashable, ...]:
    """The types of tensors in a layer, or in a part of one, and how matrices lie: what differs needs other kernels."""
    if isinstance(part, CodedMatrix):
        return (part.layout,)
    if isinstance(part, Fp8Matrix):
        return part.kind, part.factors.dtype
    if isinstance(part, Tensor):
        return (part.dtype,)
    if isinstance(part, tuple):
        return tuple(map(stored_as, part))
    if not is_dataclass(part):
        return ()
    return tuple(stored_as(getattr(part, field.name)) for field in fields(part))
