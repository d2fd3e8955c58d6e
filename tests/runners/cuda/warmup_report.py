"""Warm up launches for an H100, without one, and print as JSON how it went: see test_warmup.py.

Kernels are really compiled, in threads; only the driver's part, to load and launch them, is made up.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from compile_report import (
    BF16,
    CASES,
    GPUS,
    H100,
    int4_matrix,
    int8_matrix,
    ints,
    quantized_product,
)
from tiny_server import calibration_steps, tiny_runner

from slipstream.runners.cuda import calibrate
from slipstream.runners.cuda.kernels import gpus
from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig, skinny_linear
from slipstream.runners.cuda.kernels.sampling.sample import choose
from slipstream.runners.cuda.warmup import Launch, compile_together, distinct, one_of_each, recorded

gpus._ask = lambda device: GPUS[90]


class LaunchingH100(H100):
    """Counts launches, and remembers which threads made kernels ready for them."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.threads: set[int] = set()
        self.refused = 0  # kernels that still fail to load
        self.utils = SimpleNamespace(
            load_binary=self.load,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            unload_module=lambda module: None,
        )

    def load(self, name: str, *_: Any) -> tuple[object, int, int, int, int]:
        self.threads.add(threading.get_ident())
        if self.refused:
            self.refused -= 1
            raise RuntimeError("no context")
        return object(), 1, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launches.append(metadata.name)


def product() -> None:
    """Its operands are descriptors."""
    x, weight = torch.empty(4, 512, dtype=BF16), torch.empty(64, 512, dtype=BF16)
    skinny_linear(x, weight, TileConfig(64, 128, 3), Scratch(torch.device("cpu")))


def sample() -> None:
    """Takes no confidences: a pointer that is None."""
    rows = torch.zeros(4, dtype=torch.int32)
    choose(torch.empty(4, 512), rows, rows, torch.zeros(4), torch.zeros(4, dtype=torch.int64), rows)


def steps() -> None:
    for case in ("norm 27B", "silu 27B, 1", "attend SmolLM2, 1 row of 4", "fused 4B, prefetch"):
        CASES[case]()
    product()
    sample()


def names(launches: Iterable[Launch]) -> list[str]:
    return sorted(launch.function.fn.__name__ for launch in launches)


def calibration() -> dict[str, list[str]]:
    """The kernels that steps as calibration runs them launch, and those that a warm-up does not. None is compiled."""
    runner, row_sizes = tiny_runner("float32"), [1, 2, 4]
    launcher, program = runner.launcher, runner.program
    sizes = calibrate._sizes(row_sizes, program.depth)
    sampled = calibrate._layout(launcher, 1, 1, 0, plain=False)
    timed, untimed = calibration_steps(runner, row_sizes)
    with torch.inference_mode(), recorded() as launches:
        for layout in timed + untimed:
            launcher.run(layout)
    program.buffers.upload.zero_()  # of no consequence where steps are captured
    short = program.with_layers(one_of_each(program.decoder.layers))
    with torch.inference_mode(), recorded() as ahead:
        for layout in distinct(calibrate._to_warm_up(launcher, sizes, [sampled])):
            short.step(layout)
    return {"calibration": names(launches), "not warmed up": names(set(launches) - set(ahead))}


def quantized_for_few_tokens() -> list[str]:
    """What products with quantized matrices and lookups in them launch, for any number of tokens that is not padded."""
    with recorded() as launches:
        for num_tokens in (1, 2, 3, 4, 8, 12, 16):
            for matrix in (int8_matrix(64, 512), int4_matrix(64, 512)):
                quantized_product(matrix, num_tokens)
                matrix.weights(BF16, ints(num_tokens))
    return names(launches)


def main() -> None:
    driver = LaunchingH100()
    triton.runtime.driver.set_active(driver)
    print(json.dumps(compiled_ahead(driver) | calibration() | {"quantized, few tokens": quantized_for_few_tokens()}))


def compiled_ahead(driver: LaunchingH100) -> dict[str, Any]:
    with recorded() as launches:
        steps()
        steps()
    report: dict[str, Any] = {"recorded": names(launches), "launched meanwhile": len(driver.launches)}
    driver.refused = 1
    compile_together(launches, lambda: None)
    own = threading.get_ident()
    report["threads"] = len(driver.threads - {own})
    report["mended here"] = own in driver.threads
    with recorded() as missed:
        steps()
    report |= {"missed": names(missed), "launched": len(driver.launches)}
    before = {launch: _hashes(launch) for launch in launches}
    for launch in launches:
        launch.function.device_caches.clear()
    steps()
    report["as a launch compiles them"] = all(_hashes(launch) == before[launch] for launch in launches)
    return report


def _hashes(launch: Launch) -> dict[str, str]:
    """Of the compiled kernels of its function, by the key that a launch looks for."""
    return {key: kernel.hash for key, kernel in launch.function.device_caches[0][0].items()}


if __name__ == "__main__":
    main()
