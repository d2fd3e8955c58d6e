"""How long the two parts of a step took, on the host or on a GPU that runs ahead of it."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class StepClock(Protocol):
    def mark(self) -> None:
        """Called at the start, between verification and drafting, and at the end."""

    def read(self) -> tuple[float, float]:
        """Seconds of both parts, after the step's host sync."""
        ...


class HostClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        start, middle, end = self._marks
        return middle - start, end - middle


class CudaClock:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def read(self) -> tuple[float, float]:
        start, middle, end = self._events
        return start.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3


def step_clock(device: torch.device) -> StepClock:
    return CudaClock() if device.type == "cuda" else HostClock()
