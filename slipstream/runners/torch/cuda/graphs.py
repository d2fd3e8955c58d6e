"""Steps captured as CUDA graphs, lazily: a step of a new shape runs as it is, its second time is captured.

A captured step costs the host one launch. All graphs share one pool of memory: none keeps anything between replays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if self.enabled:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, step: Callable[[], None], *, capture: bool = True) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif self.enabled and capture and key in self._seen:
            graph = self._graphs[key] = self._capture(step)
            graph.replay()
        else:
            self._seen.add(key)  # the first time compiles kernels, which a capture could not
            step()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph
