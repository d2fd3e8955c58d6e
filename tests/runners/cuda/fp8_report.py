"""On a GPU: products with activations in FP8 against those that unpack FP8 weights, in the shapes of 27B and 35B-A3B.

`python tests/runners/cuda/fp8_report.py` times both over a sweep of tiles, in about `--seconds` (150), and prints
a line for each shape and number of tokens: microseconds, the best tiles, TFLOP/s, GB/s, and how far results are off
those of float32 on the rounded operands. `--all FILE` keeps a JSON line for each timing. `--tiny` runs small shapes, to
see that the script does: without a GPU in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import IO, Any

import torch
from quick_interpreter import quicken
from torch import Tensor

from slipstream.runners.cuda.graphs import replay_seconds
from slipstream.runners.cuda.kernels.gpus import gpu
from slipstream.runners.cuda.kernels.matmul.linear import Scratch, TileConfig, fitted
from slipstream.runners.cuda.kernels.matmul.linear_fp8 import fp8_linear, fp8_tile_config, launch_fp8, tokens_of_a_block
from slipstream.runners.cuda.kernels.matmul.linear_quantized import SCRATCH_FLOATS, SPLIT_K_COUNTERS
from slipstream.runners.cuda.kernels.moe.experts_fp8 import ExpertTiles, expert_tiles, fp8_expert_pairs
from slipstream.runners.cuda.kernels.moe.experts_quantized import quantized_expert_pairs
from slipstream.runners.cuda.kernels.quant.activations import quantized_activations
from slipstream.runners.cuda.kernels.quant.fp8 import BYTES, MOVED, TILE, Fp8Matrix, empty
from slipstream.runners.cuda.model.quantized import CudaQuantizedLinear
from slipstream.runners.cuda.warmup import compile_together, recorded

TOKENS = (1, 16, 64, 128, 256, 512, 2048)
SHAPES = {  # rows, columns, rows in more bits
    "27B gate, up": (34816, 5120, 0),
    "27B down": (5120, 17408, 0),
    "27B entry": (16384, 5120, 96),
    "27B out": (5120, 6144, 0),
    "35B-A3B entry": (12288, 2048, 64),
    "35B-A3B out": (2048, 4096, 0),
}
EXPERTS = {"35B-A3B experts": (256, 8, 2048, 512)}  # experts, active, hidden, inner
TINY_SHAPES, TINY_EXPERTS = {"tiny": (130, 256, 6)}, {"tiny experts": (4, 2, 128, 128)}


@dataclass(frozen=True, slots=True)
class Bench:
    device: torch.device
    end: float  # of the time for all
    file: IO[str] | None
    scratch: Scratch
    copies: int  # of each matrix, one after the other: weights come from memory, not from the cache
    num_configs: int  # tiles in a sweep, at most
    results: list[str] = field(default_factory=list)

    def seconds(self, run: Callable[[], None]) -> float:
        """Of one product: the median of a few replays of one with each copy."""
        run()
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / self.copies
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return replay_seconds(graph) / self.copies

    def note(self, **entry: Any) -> None:
        if self.file is not None:
            print(json.dumps(entry), file=self.file, flush=True)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end


def made(shape: tuple[int, int, int], device: torch.device, layout: int) -> Fp8Matrix:
    num_rows, width, num_kept = shape
    kept = torch.randn(num_kept, width, device=device, dtype=torch.bfloat16) if num_kept else None
    matrix = empty((num_rows, width), device, kept, layout)
    # Any bits but those of codes that are no numbers: their exponents have a bit that is not set.
    matrix.words.random_(-(1 << 15), 1 << 15)
    matrix.words.bitwise_and_(~0x0808 if layout == BYTES else ~0x1080)
    matrix.factors.copy_((torch.rand(matrix.factors.shape, device=device) + 0.5) * 2.0**86)
    return matrix


def tile_configs(matrix: Fp8Matrix, num_tokens: int) -> Iterator[tuple[TileConfig, int]]:
    """The usual one first; each with the tokens of a program."""
    usual, block = fp8_tile_config(matrix, num_tokens), tokens_of_a_block(matrix, num_tokens)
    found = {(usual, block): None}
    for rows, stages, warps in ((64, 3, 4), (64, 4, 4), (64, 6, 4), (128, 3, 4), (128, 3, 8), (128, 4, 8), (256, 3, 8)):
        for size in {block} if num_tokens <= 64 else {64, 128}:
            if rows * size <= 2048 * warps:  # sums are in registers twice, 64 each of a thread's at most
                split = usual.split if rows <= usual.rows and size <= block else 1
                found[replace(usual, rows=rows, stages=stages, warps=warps, split=split), size] = None
    device = gpu(matrix.words.device)
    for config, size in found:
        fits = fitted(config, size, 1, device, weight_bytes=1)
        if fits is not None:
            yield fits, size


def error(got: Tensor, x: Tensor, matrix: Fp8Matrix) -> float:
    """Against float32 on the operands as they were rounded, of the first tokens."""
    few = x[:16]
    rounded = quantized_activations(few)
    pairs = rounded.codes.float().view(len(few), -1, TILE // 2, 2)
    tiles = torch.cat((pairs[..., 0], pairs[..., 1]), dim=2) * rounded.scales[:, : len(few)].T[..., None]
    weights, num_coded = matrix.weights(torch.float32), matrix.words.shape[0]
    wanted = torch.cat((tiles.flatten(1) @ weights[:num_coded].T, few.float() @ weights[num_coded:].T), dim=1)
    return float((got[:16].float() - wanted).norm() / wanted.norm())


def report_linear(bench: Bench, name: str, shape: tuple[int, int, int], tokens: tuple[int, ...]) -> None:
    device, scratch = bench.device, bench.scratch
    plain, coded = ([made(shape, device, layout) for _ in range(bench.copies)] for layout in (MOVED, BYTES))
    for num_tokens in tokens:
        if bench.is_over:
            return
        x = torch.randn(num_tokens, shape[1], device=device, dtype=torch.bfloat16)

        def by(linears: list[CudaQuantizedLinear], x: Tensor = x) -> None:
            for linear in linears:
                linear(x)

        def rounded(config: TileConfig, size: int, x: Tensor = x) -> None:
            for matrix in coded:
                fp8_linear(x, matrix, config, scratch, launch=partial(launch_fp8, block_tokens=size))

        def rounding(x: Tensor = x) -> None:
            for _ in range(bench.copies):
                quantized_activations(x)

        today, in_bytes = (
            partial(by, [CudaQuantizedLinear(each, None, scratch, torch.bfloat16) for each in matrices])
            for matrices in (plain, coded)
        )
        configs = list(tile_configs(coded[0], num_tokens))[: bench.num_configs]
        compile_ahead(device, [today, in_bytes, rounding, *(partial(rounded, *each) for each in configs)])
        base = {"unpacked": bench.seconds(today), "bytes": bench.seconds(in_bytes), "rounding": bench.seconds(rounding)}
        timed = {each: bench.seconds(partial(rounded, *each)) for each in configs}
        best = min(timed, key=lambda each: timed[each])
        got = fp8_linear(x, coded[0], best[0], scratch, launch=partial(launch_fp8, block_tokens=best[1]))
        total = shape[0] + shape[2]
        moved = shape[0] * shape[1] + 2 * (shape[2] * shape[1] + num_tokens * (shape[1] + total))
        for (config, size), seconds in timed.items():
            bench.note(shape=name, tokens=num_tokens, config=str(config), block=size, microseconds=seconds * 1e6)
        show(bench, name, num_tokens, base, timed[configs[0]], timed[best], 2 * num_tokens * total * shape[1], moved)
        bench.results[-1] += f"  error {error(got, x, coded[0]):.1e}  {best[1]} tokens, {best[0]}"
        print(bench.results[-1], flush=True)


def report_experts(bench: Bench, name: str, shape: tuple[int, int, int, int], tokens: tuple[int, ...]) -> None:
    (count, active, hidden, inner), device = shape, bench.device
    sizes = (count * 2 * inner, hidden, 0), (count * hidden, inner, 0)
    plain, coded = ([made(size, device, layout) for size in sizes] for layout in (MOVED, BYTES))
    for num_tokens in tokens:
        if bench.is_over:
            return
        x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
        expert = torch.rand(num_tokens, count, device=device).argsort(1)[:, :active].int().contiguous()
        work = (expert, torch.zeros(num_tokens, dtype=torch.int32, device=device))

        def by(matrices: list[Fp8Matrix], x: Tensor = x, work: tuple[Tensor, Tensor] = work) -> None:
            for _ in range(bench.copies):
                quantized_expert_pairs(x, *matrices, *work)

        def rounded(tiles: ExpertTiles, x: Tensor = x, work: tuple[Tensor, Tensor] = work) -> None:
            for _ in range(bench.copies):
                fp8_expert_pairs(x, *coded, *work, tiles)

        usual = expert_tiles(num_tokens, num_tokens * active / count)
        others = [ExpertTiles(usual.pairs, *each) for each in product((64, 128), (4, 8), (2, 4))]
        sweep = list(dict.fromkeys((usual, *others)))[: bench.num_configs]
        today, in_bytes = partial(by, plain), partial(by, coded)
        compile_ahead(device, [today, in_bytes, *(partial(rounded, each) for each in sweep)])
        base = {"unpacked": bench.seconds(today), "bytes": bench.seconds(in_bytes)}
        timed = {each: bench.seconds(partial(rounded, each)) for each in sweep}
        best = min(timed, key=lambda each: timed[each])
        used, pairs = len(expert.unique()), num_tokens * active
        moved = used * 3 * hidden * inner + 2 * pairs * (2 * hidden + inner)
        for tiles, seconds in timed.items():
            bench.note(shape=name, tokens=num_tokens, config=str(tiles), microseconds=seconds * 1e6)
        show(bench, name, num_tokens, base, timed[usual], timed[best], 6 * pairs * hidden * inner, moved)
        got, wanted = fp8_expert_pairs(x, *coded, *work, best), quantized_expert_pairs(x, *coded, *work)
        off = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        bench.results[-1] += f"  off {off:.1e} from unrounded  {best}"
        print(bench.results[-1], flush=True)


def show(
    bench: Bench, name: str, tokens: int, base: dict[str, float], usual: float, best: float, flops: int, moved: int
) -> None:
    others = "  ".join(f"{what} {seconds * 1e6:7.1f}" for what, seconds in base.items())
    rates = f"{flops / best / 1e12:6.1f} TFLOP/s {moved / best / 1e9:6.0f} GB/s"
    times = f"fp8 {usual * 1e6:7.1f}, best {best * 1e6:7.1f} us ({base['unpacked'] / best:.2f} x)"
    bench.results.append(f"{name:16} {tokens:5}  {others}  {times}  {rates}")


def compile_ahead(device: torch.device, runs: list[Callable[[], None]]) -> None:
    """On all cores; the interpreter compiles nothing."""
    if device.type == "cpu":
        return
    with recorded() as launches:
        for run in runs:
            run()
    compile_together(launches, partial(torch.cuda.set_device, torch.cuda.current_device()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--all", type=argparse.FileType("w"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny and not torch.cuda.is_available() else "cuda")
    tokens = (1, 17) if options.tiny else TOKENS
    scratch = Scratch(device, 4 * SCRATCH_FLOATS, 16 * SPLIT_K_COUNTERS)  # also for more, smaller tiles
    bench = Bench(
        device, time.monotonic() + options.seconds, options.all, scratch, *((1, 1) if options.tiny else (4, 100))
    )
    if device.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    else:
        quicken()
    for name, shape in (TINY_SHAPES if options.tiny else SHAPES).items():
        report_linear(bench, name, shape, tokens)
    for name, experts in (TINY_EXPERTS if options.tiny else EXPERTS).items():
        report_experts(bench, name, experts, tokens)
    print("time was up: not all was timed" if bench.is_over else "all timed", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
