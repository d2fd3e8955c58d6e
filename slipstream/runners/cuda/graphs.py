"""Steps captured as CUDA graphs, lazily: when a shape first occurs.

A captured step costs the host one launch. All graphs share one pool of memory: none keeps anything between replays. The
pool never shrinks, so what is captured for the start alone has another one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from statistics import median
from typing import Any

import torch

TIMED = 5  # replays


class Graphs:
    def __init__(self, device: torch.device, enabled: bool, scarce: bool = False) -> None:
        """``scarce``: memory is short, and large steps run as they are."""
        self.enabled = enabled and device.type == "cuda"
        self._scarce = scarce
        self._warm: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._dry_run: torch.cuda.CUDAGraph | None = None
        if self.enabled:
            self._pool, self._dry_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                torch.cuda.current_blas_handle()  # the library takes its memory here, not within a capture

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, kind: Hashable, step: Callable[[], None], captures: bool = True) -> None:
        """``kind``: steps that use the same kernels. The first of a kind runs as it is, which compiles them.
        ``captures``: False: each time."""
        graph = self._graphs.get(key)
        if graph is None and self.enabled and captures and kind in self._warm:
            if self._scarce:
                torch.cuda.empty_cache()  # a capture cannot take what other steps have left cached
            graph = self._graphs[key] = self._capture(step, self._pool)
        if graph is not None:
            graph.replay()
        else:
            step()
            self._warm.add(kind)

    def seconds(self, step: Callable[[], None]) -> float:
        """How long the device takes for it, captured: the median of a few replays. Kept as by ``dry_run``."""
        step()  # as it is: compiles what is not compiled yet
        graph = self._dry_run = self._capture(step, self._dry_pool)
        return replay_seconds(graph)

    def dry_run(self, step: Callable[[], None]) -> None:
        """Capture a step and never replay it: the device does nothing. One is kept: the pool's memory goes with it."""
        self._dry_run = self._capture(step, self._dry_pool)

    def end_dry_runs(self) -> None:
        """Give back the memory that they took.

        Before the first graph that is replayed: PyTorch may free the library's memory of a stream, which graphs
        captured there use, together with any of them.
        """
        assert not self._graphs
        if self._dry_run is not None:
            self._dry_run = None
            torch.cuda.empty_cache()
            self._dry_pool = torch.cuda.graph_pool_handle()  # nothing is captured into one that has ended

    def _capture(self, step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Relaxed: a library that loads one of its kernels meanwhile may do so.
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """The median of a few replays, by the device's clock."""
    times: list[float] = []
    for _ in range(1 + TIMED):  # the first is not timed
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[1:])
