"""Compile what the kernel wrappers launch for an H100, without one: registers, spills and shared memory of each.

`python tests/runners/cuda/compile_report.py [name ...]` prints one JSON object a launch. The wrappers run unchanged on
CPU tensors; their launches are noted and compiled as before a server's first step. `--capability 86` compiles for
another GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from launched_rows import BF16, attention, ints, recurrence, rope
from some_gpus import GPUS
from tiny_server import tiny_server
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slipstream.runners.cuda.kernels import gpus
from slipstream.runners.cuda.kernels.elementwise import silu_mul
from slipstream.runners.cuda.kernels.matmul.linear import Scratch, skinny_gated, skinny_normed
from slipstream.runners.cuda.kernels.matmul.linear_fp8 import fp8_gated, fp8_linear, fp8_normed
from slipstream.runners.cuda.kernels.matmul.linear_quantized import (
    SCRATCH_FLOATS,
    SPLIT_K_COUNTERS,
    quantized_gated,
    quantized_linear,
    quantized_normed,
)
from slipstream.runners.cuda.kernels.moe.experts import expert_pairs
from slipstream.runners.cuda.kernels.moe.experts_coded import coded_expert_pairs
from slipstream.runners.cuda.kernels.moe.experts_fp8 import fp8_expert_pairs
from slipstream.runners.cuda.kernels.moe.experts_quantized import quantized_expert_pairs
from slipstream.runners.cuda.kernels.norm import concat_norm, rms_norm
from slipstream.runners.cuda.kernels.quant import coded, fp8
from slipstream.runners.cuda.kernels.quant.code_layout import BIAS, CodeLayout
from slipstream.runners.cuda.kernels.quant.fp8 import Fp8Matrix
from slipstream.runners.cuda.kernels.quant.int4 import Int4Matrix, num_tiles
from slipstream.runners.cuda.kernels.quant.int8 import Int8Matrix, num_words
from slipstream.runners.cuda.kernels.quant.quantize import QuantizedMatrix
from slipstream.runners.cuda.model import coded as coded_model
from slipstream.runners.cuda.model import fp8 as fp8_model
from slipstream.runners.cuda.model import linear as dense_model
from slipstream.runners.cuda.model.coded import CodedLinear
from slipstream.runners.cuda.model.quantized import fitted_config
from slipstream.runners.cuda.warmup import recorded
from slipstream.runners.torch.caches import FP8
from slipstream.runners.torch.ops import HeadShape

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
QWEN, SMOLLM, LLAMA = HeadShape(24, 4, 256), HeadShape(9, 3, 64), HeadShape(32, 8, 128)


class H100:
    """As much of a driver as compiling asks for; of another GPU by its capability."""

    capability = 90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def resources(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        "kernel": kernel.metadata.name,
        "registers": int(usage["REG"]),
        "spilled_bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "fp8_products": bool(re.search(r"mma\S*\.e4m3\.e4m3", kernel.asm["ptx"])),
        "waits": "griddepcontrol.wait" in kernel.asm["ptx"] and kernel.metadata.launch_pdl,
    }


def head_entry(width: int) -> None:
    weight, hidden = torch.empty(width), torch.empty(4, width, dtype=BF16)
    concat_norm(hidden, weight, hidden, weight, 1e-6)


def fused_products(num_out: int, hidden: int, inner: int, num_tokens: int = 1, prefetch: bool = False) -> None:
    """One that normalises what it made, and one with the activation in it that takes it."""
    device, add = torch.device("cpu"), torch.empty(num_tokens, hidden, dtype=BF16)
    weights = torch.empty(hidden, inner, dtype=BF16), torch.empty(num_out, hidden, dtype=BF16)
    configs = [dense_model.fitted_config(weight, None, 16) for weight in weights]
    first, second = (replace(config, prefetch=prefetch) for config in configs if config is not None)
    x = torch.empty(num_tokens, inner, dtype=BF16)
    _, normed = skinny_normed(x, weights[0], first, Scratch(device), add, torch.empty(hidden), 1e-6)
    skinny_gated(normed, weights[1], second, Scratch(device))


def int8_matrix(num_out: int, width: int) -> Int8Matrix:
    return Int8Matrix(torch.empty(num_out, num_words(width), dtype=torch.int16), torch.empty(num_out), width)


def int4_matrix(num_out: int, width: int) -> Int4Matrix:
    tiles = num_tiles(width)
    return Int4Matrix(torch.empty(num_out, tiles * 64, dtype=torch.int16), ints(tiles * 4, num_out), width)


def fp8_matrix(num_out: int, width: int, num_kept: int = 0, layout: int = fp8.MOVED, wide: bool = False) -> Fp8Matrix:
    kept = torch.empty(num_kept, width, dtype=BF16) if num_kept else None
    return fp8.empty((num_out - num_kept, width), torch.device("cpu"), kept, layout, wide=wide)


def wide_fp8_matrix(num_out: int, width: int) -> Fp8Matrix:
    """With scales in float32."""
    return fp8_matrix(num_out, width, wide=True)


def fp8_product(
    num_out: int,
    width: int,
    num_tokens: int,
    num_kept: int = 0,
    *,
    fused: bool = False,
    in_blocks: bool = False,
    wide: bool = False,
) -> None:
    """Activations in FP8, too. ``fused``: before the norm, or with the gated activation in it, by its width."""
    matrix = replace(fp8_matrix(num_out, width, num_kept, fp8.BYTES, wide), in_blocks=in_blocks)
    x = torch.empty(num_tokens, width, dtype=BF16)
    config = fp8_model.fitted_config(matrix, num_tokens)
    scratch, add = Scratch(x.device, SCRATCH_FLOATS, SPLIT_K_COUNTERS), torch.empty(num_tokens, num_out, dtype=BF16)
    if not fused:
        fp8_linear(x, matrix, config, scratch, add=add)
    elif num_out > width:
        fp8_gated(x, matrix, config, scratch)
    else:
        fp8_normed(x, matrix, config, scratch, add, torch.empty(num_out), 1e-6)


def fused_quantized(make: Callable[[int, int], QuantizedMatrix], num_tokens: int) -> None:
    """A layer's two products around its second norm, the latter with the activation in it."""
    scratch, add = (
        Scratch(torch.device("cpu"), SCRATCH_FLOATS, SPLIT_K_COUNTERS),
        torch.empty(num_tokens, 5120, dtype=BF16),
    )
    out, gate_up = make(5120, 6144), make(34816, 5120)
    first, second = (fitted_config(matrix, num_tokens, BF16) for matrix in (out, gate_up))
    assert first is not None
    assert second is not None
    x = torch.empty(num_tokens, 6144, dtype=BF16)
    _, normed = quantized_normed(x, out, first, scratch, add, torch.empty(5120), 1e-6)
    quantized_gated(normed, gate_up, second, scratch)


def experts(make: Callable[[int, int], QuantizedMatrix], num_tokens: int) -> None:
    """The 35B-A3B's: 256 of them, 8 active."""
    stacks = make(256 * 1024, 2048), make(256 * 2048, 512)
    quantized_expert_pairs(torch.empty(num_tokens, 2048, dtype=BF16), *stacks, ints(num_tokens, 8), ints(num_tokens))


def dense_experts(num_tokens: int) -> None:
    """The same in 16 bits. Of 16 experts, so that they take little memory: as many tokens to each."""
    stacks = torch.empty(16, 1024, 2048, dtype=BF16), torch.empty(16, 2048, 512, dtype=BF16)
    num_tokens = max(1, num_tokens // 16)
    x, expert = torch.empty(num_tokens, 2048, dtype=BF16), ints(num_tokens, 8)
    expert_pairs(x, *stacks, expert, ints(num_tokens))


def fp8_experts(num_tokens: int) -> None:
    stacks = fp8_matrix(256 * 1024, 2048, layout=fp8.BYTES), fp8_matrix(256 * 2048, 512, layout=fp8.BYTES)
    fp8_expert_pairs(torch.empty(num_tokens, 2048, dtype=BF16), *stacks, ints(num_tokens, 8), ints(num_tokens))


def quantized_product(matrix: QuantizedMatrix, num_tokens: int, dtype: torch.dtype = BF16) -> None:
    config = fitted_config(matrix, num_tokens, dtype)
    if config is None:
        matrix.weights(dtype)  # for the library
        return
    add = torch.empty(num_tokens, matrix.num_rows, dtype=dtype)
    scratch = Scratch(torch.device("cpu"), SCRATCH_FLOATS, SPLIT_K_COUNTERS)
    quantized_linear(torch.empty(num_tokens, matrix.width, dtype=dtype), matrix, config, scratch, add=add)


Q4_K, Q5_K, Q6_K = (
    CodeLayout(4, 0, 32, True, True),
    CodeLayout(5, 0, 32, True, True),
    CodeLayout(6, 32, 16, True, False),
)
Q8_0, AWQ = CodeLayout(8, BIAS, 32, False, False), CodeLayout(4, 0, 128, False, True)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_XS = CodeLayout(4, BIAS, 32, True, False, table=IQ4)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NVFP4 = CodeLayout(4, BIAS, 16, True, False, table=FP4, float_factors=True)


IN_CODES = {
    "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K, "Q8_0": Q8_0, "IQ4_XS": IQ4_XS, "NVFP4": NVFP4, "AWQ": AWQ
}  # fmt: skip


def coded_product(layout: CodeLayout, num_out: int, width: int, num_tokens: int) -> None:
    device = torch.device("cpu")
    matrix = coded.empty(layout, (num_out, width), device)
    assert coded_model.fitted_config(matrix, num_tokens, BF16) is not None
    linear = CodedLinear(matrix, None, Scratch(device, SCRATCH_FLOATS, SPLIT_K_COUNTERS), BF16)
    linear(torch.empty(num_tokens, width, dtype=BF16), torch.empty(num_tokens, num_out, dtype=BF16))


def coded_experts(num_tokens: int) -> None:
    """The 35B-A3B's: 256 of them, 8 active."""
    device = torch.device("cpu")
    gate_up, down = coded.empty(Q4_K, (256 * 1024, 2048), device), coded.empty(Q6_K, (256 * 2048, 512), device)
    x = torch.empty(num_tokens, 2048, dtype=BF16)
    coded_expert_pairs(x, [gate_up], down, ints(num_tokens, 8), ints(num_tokens))


CASES: dict[str, Callable[[], object]] = {
    **{
        f"{name} 27B, {num_out} x {width}, {num_tokens}": partial(coded_product, layout, num_out, width, num_tokens)
        for name, layout in IN_CODES.items()
        for num_out, width in ((34816, 5120), (5120, 17408))
        for num_tokens in (1, 2, 4, 16, 64)
    },
    **{f"Q4_K 35B-A3B experts, {n}": partial(coded_experts, n) for n in (1, 64, 1024)},
    "Q4_K 27B, unpacked": lambda: coded.empty(Q4_K, (97, 5120), torch.device("cpu")).weights(BF16),
    "Q6_K 27B, rows": lambda: coded.empty(Q6_K, (97, 5120), torch.device("cpu")).weights(BF16, ints(4)),
    "fused 27B": lambda: fused_products(34816, 5120, 17408),
    "fused 4B, prefetch": lambda: fused_products(18432, 2560, 4096, prefetch=True),
    "norm 27B": lambda: rms_norm(torch.empty(4, 5120, dtype=BF16), torch.empty(5120), 1e-6),
    "norm heads": lambda: rms_norm(torch.empty(4, 48, 128, dtype=BF16), torch.empty(128), 1e-6),
    "head entry 27B": lambda: head_entry(5120),
    "silu 27B, 1": lambda: silu_mul(torch.empty(1, 2 * 17408, dtype=BF16)),
    "silu 27B, 2048": lambda: silu_mul(torch.empty(2048, 2 * 17408, dtype=BF16)),
    "rope 27B, 4": lambda: rope(QWEN, 4, 32),
    "rope 27B, 2048": lambda: rope(QWEN, 2048, 32),
    "rope SmolLM2, 4": lambda: rope(SMOLLM, 4, 32),
    "int8 27B, 34816 x 5120, 16": lambda: quantized_product(int8_matrix(34816, 5120), 16),
    "int8 27B, 34816 x 5120, 64": lambda: quantized_product(int8_matrix(34816, 5120), 64),
    "int8 27B, 34816 x 5120, 512": lambda: quantized_product(int8_matrix(34816, 5120), 512),
    "int8 27B, 5120 x 17408, 1": lambda: quantized_product(int8_matrix(5120, 17408), 1),
    "int8 27B, 5120 x 17408, 64": lambda: quantized_product(int8_matrix(5120, 17408), 64),
    "int8 27B, 5120 x 17408, 128": lambda: quantized_product(int8_matrix(5120, 17408), 128),
    "int8 27B in float16, 16480 x 5120, 16": lambda: quantized_product(int8_matrix(16480, 5120), 16, torch.float16),
    "int8 27B, rows": lambda: int8_matrix(97, 5120).weights(BF16, ints(4)),
    "int8 27B, unpacked": lambda: int8_matrix(97, 5120).weights(BF16),
    "int4 27B, 34816 x 5120, 1": lambda: quantized_product(int4_matrix(34816, 5120), 1),
    "int4 27B, 34816 x 5120, 16": lambda: quantized_product(int4_matrix(34816, 5120), 16),
    "int4 27B, 34816 x 5120, 64": lambda: quantized_product(int4_matrix(34816, 5120), 64),
    "int4 27B, 34816 x 5120, 256": lambda: quantized_product(int4_matrix(34816, 5120), 256),
    "int4 27B, 5120 x 17408, 1": lambda: quantized_product(int4_matrix(5120, 17408), 1),
    "int4 27B, 5120 x 17408, 64": lambda: quantized_product(int4_matrix(5120, 17408), 64),
    "int4 27B in float16, 16480 x 5120, 16": lambda: quantized_product(int4_matrix(16480, 5120), 16, torch.float16),
    "int4 27B in float16, 16480 x 5120, 1": lambda: quantized_product(int4_matrix(16480, 5120), 1, torch.float16),
    "int4 4B in float32, 2560 x 4096, 1": lambda: quantized_product(int4_matrix(2560, 4096), 1, torch.float32),
    "int4 27B, rows": lambda: int4_matrix(97, 5120).weights(BF16, ints(4)),
    "int4 27B, unpacked": lambda: int4_matrix(97, 5120).weights(BF16),
    "fp8 27B, 34816 x 5120, 1": lambda: quantized_product(fp8_matrix(34816, 5120), 1),
    "fp8 27B, 34816 x 5120, 64": lambda: quantized_product(fp8_matrix(34816, 5120), 64),
    "fp8 27B, 5120 x 17408, 256": lambda: quantized_product(fp8_matrix(5120, 17408), 256),
    "fp8 27B, 16480 x 5120, 1": lambda: quantized_product(fp8_matrix(16480, 5120, 96), 1),
    "fp8 27B, 16480 x 5120, 64": lambda: quantized_product(fp8_matrix(16480, 5120, 96), 64),
    "fp8 27B in float16, 16480 x 5120, 16": lambda: quantized_product(fp8_matrix(16480, 5120), 16, torch.float16),
    **{
        f"fp8 x fp8 27B, {num_out} x {width}, {n}": partial(fp8_product, num_out, width, n, num_kept)
        for num_out, width, num_kept in ((34816, 5120, 0), (5120, 17408, 0), (16480, 5120, 96))
        for n in (1, 64, 256)
    },
    **{
        f"fp8 x fp8 27B in blocks, {n}": partial(fp8_product, 16480, 5120, n, 96, in_blocks=True)
        for n in (1, 64, 256, 2048)
    },
    **{f"fp8 x fp8 27B gated, {n}": partial(fp8_product, 34816, 5120, n, fused=True) for n in (1, 64)},
    **{f"fp8 x fp8 27B normed, {n}": partial(fp8_product, 5120, 6144, n, fused=True) for n in (1, 64)},
    **{f"fp8 x fp8 35B-A3B experts, {n}": partial(fp8_experts, n) for n in (1, 64, 640, 1024, 4096)},
    "fp8 in bytes 27B, 34816 x 5120, 1": lambda: quantized_product(fp8_matrix(34816, 5120, layout=fp8.BYTES), 1),
    "fp8 in bytes 27B, 34816 x 5120, 64": lambda: quantized_product(fp8_matrix(34816, 5120, layout=fp8.BYTES), 64),
    "wide fp8 27B, 34816 x 5120, 1": lambda: quantized_product(wide_fp8_matrix(34816, 5120), 1),
    "wide fp8 27B, 34816 x 5120, 64": lambda: quantized_product(wide_fp8_matrix(34816, 5120), 64),
    "wide fp8 27B, 5120 x 17408, 256": lambda: quantized_product(wide_fp8_matrix(5120, 17408), 256),
    "wide fp8 27B fused, 1": lambda: fused_quantized(wide_fp8_matrix, 1),
    "wide fp8 27B, unpacked": lambda: wide_fp8_matrix(97, 5120).weights(BF16),
    **{f"wide fp8 x fp8 27B, {n}": partial(fp8_product, 34816, 5120, n, wide=True) for n in (1, 64, 256)},
    "fp8 27B, unpacked": lambda: fp8_matrix(97, 5120).weights(BF16),
    "int8 27B fused, 1": lambda: fused_quantized(int8_matrix, 1),
    "fp8 27B fused, 1": lambda: fused_quantized(fp8_matrix, 1),
    "fp8 27B fused, 64": lambda: fused_quantized(fp8_matrix, 64),
    **{
        f"{kind} 35B-A3B experts, {num_tokens}": lambda make=make, num_tokens=num_tokens: experts(make, num_tokens)
        for kind, make in {
            "int8": int8_matrix,
            "int4": int4_matrix,
            "fp8": fp8_matrix,
            "wide fp8": wide_fp8_matrix,
        }.items()
        for num_tokens in (1, 64, 1024, 4096)
    },
    **{f"35B-A3B experts, {num_tokens}": partial(dense_experts, num_tokens) for num_tokens in (1, 512, 2048, 8192)},
    "tiny server": tiny_server,
    "recurrence 27B, 1 row of 4": lambda: recurrence(1, 4),
    "recurrence 27B, 16 rows of 4": lambda: recurrence(16, 64),
    "recurrence 27B, nothing kept": lambda: recurrence(2, 128, True, max_keeps=0),
    "recurrence 27B, prompts": lambda: recurrence(2, 128, True),
    "recurrence 27B in float32, prompts": lambda: recurrence(2, 128, True, torch.float32),
    **{
        f"recurrence 27B, states in {name}, {label}": partial(recurrence, *rows, states=getattr(torch, name))
        for name in ("float16", "bfloat16")
        for label, rows in (("1 row of 4", (1, 4)), ("16 rows of 4", (16, 64)), ("prompts", (2, 128, True)))
    },
    "attend 27B, 1 row of 1": lambda: attention(QWEN, 1, 1, 65536),
    "attend 27B, 1 short row of 1": lambda: attention(QWEN, 1, 1, 512),
    "attend 27B, 1 short row of 4": lambda: attention(QWEN, 4, 4, 512),
    "attend 27B, 64 rows of 1": lambda: attention(QWEN, 64, 1, 1024),
    "attend 27B, 1 row of 4": lambda: attention(QWEN, 4, 4, 65536),
    "attend 27B, 1 row of 8": lambda: attention(QWEN, 8, 8, 65536),
    "attend 27B, 64 rows of 4": lambda: attention(QWEN, 256, 4, 1024),
    "attend 27B, prompt in 16": lambda: attention(QWEN, 2048, 16, 4096),
    "attend 27B, prompt in 64": lambda: attention(QWEN, 2048, 64, 4096),
    "attend SmolLM2, 1 row of 4": lambda: attention(SMOLLM, 4, 4, 2048),
    "attend SmolLM2, 64 rows of 4": lambda: attention(SMOLLM, 256, 4, 1024),
    "attend SmolLM2, prompt in 64": lambda: attention(SMOLLM, 2048, 64, 1024),
    "attend 80 channels": lambda: attention(HeadShape(8, 8, 80), 256, 4, 1024),
    "attend 128 channels, prompt in 64": lambda: attention(LLAMA, 2048, 64, 4096),
    "attend SmolLM2 in float32": lambda: attention(SMOLLM, 256, 4, 1024, torch.float32),
    "attend 27B in float32, 1 row of 8": lambda: attention(QWEN, 8, 8, 1024, torch.float32),
    "attend 27B in float32, prompt in 64": lambda: attention(QWEN, 2048, 64, 4096, torch.float32),
    "rope 27B, KV in fp8, 4": lambda: rope(QWEN, 4, 32, FP8),
    "rope 27B, KV in fp8, 2048": lambda: rope(QWEN, 2048, 32, FP8),
    "attend 27B, KV in fp8, 1 row of 1": lambda: attention(QWEN, 1, 1, 65536, kv_dtype=FP8),
    "attend 27B, KV in fp8, 1 short row of 4": lambda: attention(QWEN, 4, 4, 512, kv_dtype=FP8),
    "attend 27B, KV in fp8, 1 row of 8": lambda: attention(QWEN, 8, 8, 65536, kv_dtype=FP8),
    "attend 27B, KV in fp8, 64 rows of 4": lambda: attention(QWEN, 256, 4, 1024, kv_dtype=FP8),
    "attend 27B, KV in fp8, prompt in 16": lambda: attention(QWEN, 2048, 16, 4096, kv_dtype=FP8),
    "attend 27B, KV in fp8, prompt in 64": lambda: attention(QWEN, 2048, 64, 4096, kv_dtype=FP8),
    "attend SmolLM2, KV in fp8, 64 rows of 4": lambda: attention(SMOLLM, 256, 4, 1024, kv_dtype=FP8),
    "attend 128 channels, KV in fp8, 1 row of 4": lambda: attention(LLAMA, 4, 4, 65536, kv_dtype=FP8),
    "attend 128 channels, KV in fp8, prompt in 64": lambda: attention(LLAMA, 2048, 64, 4096, kv_dtype=FP8),
    "attend SmolLM2 in float32, KV in fp8": lambda: attention(SMOLLM, 256, 4, 1024, torch.float32, FP8),
}


def pretend(capability: int) -> None:
    """Wrappers and compiler see this GPU from now on."""
    H100.capability = capability
    triton.runtime.driver.set_active(H100())
    gpus._ask = lambda device: GPUS[capability]
    gpus.gpu.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=90, choices=GPUS)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    pretend(options.capability)
    run = JITFunction.run
    # What an earlier case compiled is not launched either.
    JITFunction.run = lambda self, *args, **options: run(self, *args, **(options | {"warmup": True}))
    for name in options.cases:
        with recorded() as launches:
            CASES[name]()
        for launch in launches:
            kernel = launch.function.preload(launch.specialization)
            print(json.dumps({"case": name, **resources(kernel)}), flush=True)


if __name__ == "__main__":
    main()
