"""Products in the codes of quantised files on this GPU: time, bytes, and how far they are off.

`python tests/runners/cuda/container_report.py` prints one JSON object a line: for matrices of the 27B and 1 to 256
tokens the microseconds of a product, the bytes of the matrix, and what share of the speed of a copy that is, next to
bfloat16 and `--dtype int4` and `int8`; and the error of some rows against float64. `--sweep` tries tile configs.
Matrices are many enough not to stay in a cache, and all their products are one captured graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compile_report import IN_CODES, IQ4
from torch import Tensor

from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig
from slipstream.runners.cuda.kernels.matmul.linear_coded import coded_linear, tile_config
from slipstream.runners.cuda.kernels.matmul.linear_quantized import SCRATCH_FLOATS, SPLIT_K_COUNTERS
from slipstream.runners.cuda.kernels.quant.code_layout import BIAS, CodeLayout
from slipstream.runners.cuda.kernels.quant.coded import CodedMatrix, empty
from slipstream.runners.cuda.model.coded import CodedLinear
from slipstream.runners.cuda.model.linear import CudaFormat
from slipstream.runners.cuda.model.ops import CudaOps
from slipstream.runners.cuda.model.quantized import quantized_format
from slipstream.runners.cuda.warmup import compile_together, recorded
from slipstream.runners.torch.ops import Linear

SHAPES = [(34816, 5120), (17408, 5120), (5120, 17408), (10240, 5120), (248320, 5120)]
TOKENS = (1, 4, 16, 64, 256)
KINDS = IN_CODES | {
    "Q4_0": CodeLayout(4, 8, 32, False, False),
    "IQ4_NL": CodeLayout(4, BIAS, 32, False, False, table=IQ4),
}
OTHERS = ("bfloat16", "int8", "int4")
WHOLE_BYTES = 400 << 20  # of all matrices of a measurement: several times a cache
SAMPLE = 512  # rows whose products are compared with float64
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SWEPT = [
    TileConfig(rows, 256, stages, split=split, warps=warps)
    for rows, warps in ((64, 2), (64, 4), (128, 4), (128, 8))
    for stages in (2, 3, 4, 6)
    for split in (1, 2, 4, 8)
]


def random_matrix(layout: CodeLayout, num_rows: int, width: int) -> CodedMatrix:
    """Any codes and factors, steps and scales of a sensible size."""
    matrix = empty(layout, (num_rows, width), DEVICE)
    for words in (matrix.words, matrix.high, matrix.scales if layout.has_factors else None):
        if words is not None:
            words.random_(-(1 << 15), 1 << 15)
    if layout.float_factors:
        matrix.scales.bitwise_and_(0x3737)  # no byte is the one that stands for no number
    for pairs in (None if layout.has_factors else matrix.scales, matrix.minimums):
        if pairs is not None:
            sizes = torch.rand(pairs.shape, device=DEVICE) * 0.1 + 0.01
            high = sizes.bfloat16()
            pairs.copy_(torch.stack((high, (sizes - high.float()).bfloat16()), -1).view(torch.int32).squeeze(-1))
    if matrix.steps is not None:
        matrix.steps.uniform_(0.01, 0.1)
    return matrix


def made(kind: str, num_rows: int, width: int, scratch: Scratch) -> Linear:
    if kind in KINDS:
        return CodedLinear(random_matrix(KINDS[kind], num_rows, width), None, scratch, BF16)
    ops, weights = CudaOps(DEVICE, BF16), torch.randn(num_rows, width, device=DEVICE, dtype=BF16)
    form = CudaFormat(ops) if kind == "bfloat16" else quantized_format(ops, kind)
    return form.dense(weights)


def copies(kind: str, num_rows: int, width: int, scratch: Scratch) -> list[Linear]:
    first = made(kind, num_rows, width, scratch)
    return [first, *(made(kind, num_rows, width, scratch) for _ in range(WHOLE_BYTES // first.num_bytes))]


def microseconds(products: list[Callable[[], object]]) -> float:
    """Of one of them."""
    for product in products:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(max(1, 16 // len(products))):
            for product in products:
                product()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * min(times) / (len(products) * max(1, 16 // len(products)))


def copy_speed() -> float:
    """Bytes a second, read and written, by a kernel: a captured copy showed two thirds of that."""
    source = torch.empty(1 << 30, dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: torch.bitwise_not(source, out=target)]) * 1e-6)


def error(linear: Linear, x: Tensor) -> float:
    """Of a product's length, over some rows."""
    ids = torch.arange(0, linear.num_out, max(1, linear.num_out // SAMPLE), device=DEVICE, dtype=torch.int32)
    weights = linear.matrix.weights(torch.float32, ids) if isinstance(linear, CodedLinear) else linear.rows(ids)
    wanted = x.double() @ weights.double().T
    size = weights.double().norm(dim=1)
    got = linear(x)[:, ids.long()].double()
    return float(((got - wanted) / size).norm() / (wanted / size).norm())


def measured(kind: str, shape: tuple[int, int], speed: float, scratch: Scratch) -> Iterator[dict[str, Any]]:
    num_rows, width = shape
    linears = copies(kind, num_rows, width, scratch)
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, width, device=DEVICE).to(BF16)
        took = microseconds([partial(linear, x) for linear in linears])
        num_bytes = linears[0].num_bytes
        yield {
            "kind": kind, "rows": num_rows, "columns": width, "tokens": num_tokens, "us": round(took, 1),
            "bytes": num_bytes, "bits": round(8 * num_bytes / (num_rows * width), 3),
            "of_copy": round(num_bytes / (took * 1e-6) / speed, 3), "error": float(f"{error(linears[0], x):.3g}"),
        }  # fmt: skip


def swept(kind: str, shape: tuple[int, int], scratch: Scratch) -> Iterator[dict[str, Any]]:
    """The fastest configs, and the one that is used."""
    linears = [each for each in copies(kind, *shape, scratch) if isinstance(each, CodedLinear)]
    for num_tokens in (1, 16, 64):
        x = torch.randn(num_tokens, shape[1], device=DEVICE).to(BF16)
        out = torch.empty(num_tokens, shape[0], device=DEVICE, dtype=BF16)
        used = tile_config(linears[0].matrix, num_tokens)
        assert used is not None
        times: dict[TileConfig, float] = {}
        for config in {*SWEPT, used}:
            calls = [partial(coded_linear, x, each.matrix, config, scratch, out) for each in linears]
            try:
                times[config] = microseconds(calls)
            except (AssertionError, RuntimeError):  # more than the scratch or a processor holds
                continue
        best = sorted(times, key=lambda config: times[config])[:4]
        yield {
            "kind": kind, "rows": shape[0], "columns": shape[1], "tokens": num_tokens,
            "used": [*_numbers(used), round(times[used], 1)],
            "best": [[*_numbers(config), round(times[config], 1)] for config in best],
        }  # fmt: skip


def _numbers(config: TileConfig) -> tuple[int, ...]:
    return config.rows, config.stages, config.split, config.warps


def compile_all(kinds: list[str], scratch: Scratch) -> None:
    """All kernels of the measurements at once."""
    with recorded() as launches:
        for kind in kinds:
            for shape in SHAPES[:-1]:
                linear = made(kind, *shape, scratch)
                for num_tokens in TOKENS:
                    linear(torch.zeros(num_tokens, shape[1], device=DEVICE, dtype=BF16))
    compile_together(launches, partial(torch.cuda.set_device, torch.cuda.current_device()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=[*OTHERS, *KINDS])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only so many of them")
    options = parser.parse_args()
    scratch = Scratch(DEVICE, SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    compile_all(options.kinds, scratch)
    speed = copy_speed()
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_tb_s": round(speed * 1e-12, 3)}), flush=True)
    for shape in SHAPES[: options.shapes]:
        for kind in options.kinds:
            lines = swept(kind, shape, scratch) if options.sweep else measured(kind, shape, speed, scratch)
            for line in lines:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
