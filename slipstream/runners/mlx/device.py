"""The device MLX computes on: its name, how fast it copies, how much of it was taken. Knows no model."""

from __future__ import annotations

import gc
import time

import mlx.core as mx

from slipstream.errors import ConfigError
from slipstream.host import cpu_name, peak_resident_bytes

COPY_BYTES = {"gpu": 1 << 30, "cpu": 256 << 20}  # far more than any cache holds
COPY_ROUNDS = 10


class MlxDevice:
    def __init__(self, name: str) -> None:
        """``auto``: the GPU where there is one."""
        if name not in ("auto", "cpu"):
            raise ConfigError(f"on MLX, device is auto or cpu, not {name!r}")
        self._asked = name
        self.use()
        self.kind = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"

    def use(self) -> None:
        """For the arrays that this thread makes."""
        if self._asked == "cpu":
            mx.set_default_device(mx.cpu)

    @property
    def name(self) -> str:
        return str(mx.device_info()["device_name"]) if self.kind == "gpu" else cpu_name()

    def copy_bandwidth(self) -> float:
        """Of an operation that reads each byte and writes it once: MLX copies nothing without need."""
        source = mx.zeros(COPY_BYTES[self.kind], dtype=mx.uint8)
        mx.eval(source)
        _copy_seconds(source)  # its pages are touched before the clock counts
        seconds = min(_copy_seconds(source) for _ in range(COPY_ROUNDS))
        num_bytes = source.nbytes
        del source
        self.release_memory()
        return 2 * num_bytes / seconds

    def release_memory(self) -> None:
        gc.collect()
        mx.clear_cache()

    def watch_memory(self) -> MlxPeakMemory:
        return MlxPeakMemory()


class MlxPeakMemory:
    """Arrays at their peak; on Linux the whole process, too."""

    def __init__(self) -> None:
        mx.reset_peak_memory()

    def read(self) -> dict[str, int]:
        resident = peak_resident_bytes()
        return {"allocated": mx.get_peak_memory(), **({"resident": resident} if resident else {})}


def _copy_seconds(source: mx.array) -> float:
    began = time.perf_counter()
    mx.eval(mx.bitwise_invert(source))
    return time.perf_counter() - began
