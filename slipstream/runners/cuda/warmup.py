"""Before the first step: the kernels it and its followers need, compiled on all cores at once, not one by one when met.

Steps are captured and never replayed, so the device does nothing; each launch that would compile is noted and skipped.
Whatever goes wrong here costs time only: what was not compiled ahead is compiled when it is first launched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton

from slipstream.host import available_threads
from slipstream.runners.cuda.kernels.matmul.linear import padded
from slipstream.runners.cuda.kernels.matmul.linear_quantized import compiled_for
from slipstream.runners.cuda.layout import Layout
from slipstream.runners.torch.models.layers import Layers, Sequential

if TYPE_CHECKING:
    from slipstream.runners.cuda.runner import CudaRunner

PATIENCE = 1.0  # seconds after which whoever waits is told why: reading compiled kernels takes less
ANY_GRID = (1, 1, 1)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as one launch would compile it."""

    function: Any  # Triton's JITFunction
    specialization: str

    def compile(self) -> Any:
        kernel = self.function.preload(self.specialization)
        with suppress(Exception):  # the thread that launches tries again, and hears of it
            make_ready(kernel)
        return kernel


def make_ready(kernel: Any) -> None:
    """Build its launcher and load it, unless that is done: to ask for a grid does it, and launches nothing."""
    kernel[ANY_GRID]


def hash_triton() -> threading.Thread:
    """Triton tells its caches apart by a hash of itself, once a process: begun before it is asked for."""
    thread = threading.Thread(target=_hash_triton, name="hash-triton", daemon=True)
    thread.start()
    return thread


def _hash_triton() -> None:
    with suppress(Exception):  # no part of Triton's interface: whoever needs it computes it
        triton.runtime.cache.triton_key()


def rehearse(runner: CudaRunner, layouts: Iterable[Layout]) -> None:
    """Compile what steps of these layouts need."""
    if not runner.graphs.enabled:
        return
    try:
        torch.cuda.current_blas_handle()  # the library starts here, not within a capture
        with noted() as launches, shortened(runner):
            for layout in distinct(layouts):
                runner.rehearse(layout)
        compile_together(launches, partial(torch.cuda.set_device, torch.cuda.current_device()))
    except Exception:  # of PyTorch or Triton, in what no step depends on
        log.warning("kernels are compiled one by one: their rehearsal failed", exc_info=True)


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches of this thread that need a kernel which is not compiled yet, each once. They are skipped."""
    launches: dict[Hashable, Launch] = {}
    runtime = triton.knobs.runtime
    thread, before = threading.get_ident(), runtime.jit_cache_hook

    def note(*, key: str, fn: Any, compile: dict[str, Any], **others: Any) -> bool | None:
        if threading.get_ident() != thread:
            return before(key=key, fn=fn, compile=compile, **others) if before else None
        launches.setdefault((fn.module, fn.name, key), Launch(fn.jit_function, compile["specialization_data"]))
        return True

    found: list[Launch] = []
    runtime.jit_cache_hook = note
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
    failed = [error for error in map(_error, futures) if error is not None]
    if failed:
        log.warning("%d of %d kernels were not compiled ahead, the first: %r", len(failed), len(launches), failed[0])


def _error(future: Future[Any]) -> Exception | None:
    """Why a kernel is not ready. What only its thread could not do is done here."""
    try:
        make_ready(future.result())
    except Exception as error:  # its first launch meets it again, if it is real
        return error
    return None


def distinct(layouts: Iterable[Layout]) -> list[Layout]:
    """One of those that need the same kernels, as far as can be told from sizes."""
    found: dict[Hashable, Layout] = {}
    for layout in layouts:
        found.setdefault(_needs(layout), layout)
    return list(found.values())


def _needs(layout: Layout) -> Hashable:
    shape = layout.shape
    way = (shape.tile_size, shape.context, shape.has_prompts, shape.plain, shape.feeds_head, shape.masked)
    sizes = (shape.num_rows, shape.num_tokens, shape.num_draws, shape.num_tiles, *layout.pass_rows)
    multiplied = (shape.num_tokens, shape.num_draws, *layout.pass_rows)
    return way, tuple(_told_apart(size) for size in sizes), tuple(compiled_for(size) for size in multiplied)


def _told_apart(size: int) -> Hashable:
    """What attention and Triton make a difference of."""
    return padded(size), size == 1, size % 16 == 0


@contextmanager
def shortened(runner: CudaRunner) -> Iterator[None]:
    """With one layer of each kind: others launch the same kernels."""
    whole = runner.decoder
    runner.decoder = replace(whole, layers=one_of_each(whole.layers))
    try:
        yield
    finally:
        runner.decoder = whole


def one_of_each(layers: Layers) -> Layers:
    """The first kind comes twice: behind another layer it may run otherwise."""
    if not isinstance(layers, Sequential):
        return layers
    kinds = list({(type(layer.mixer), type(layer.mlp)): layer for layer in layers.layers}.values())
    return replace(layers, layers=[*kinds, kinds[0]])
