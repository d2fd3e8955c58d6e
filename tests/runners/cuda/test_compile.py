"""The kernels as an H100 would run them: Triton compiles them without one, and next to nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from some_gpus import GPUS

SCRIPT = Path(__file__).parent / "compile_report.py"
ONE_OF_A_KIND = [
    "fused 4B, prefetch",
    "attend 27B, prompt in 64",
    "int8 27B fused, 1",
    "int4 27B, 34816 x 5120, 16",
    "fp8 35B-A3B experts, 1024",
    "wide fp8 27B, 34816 x 5120, 64",
    "Q4_K 27B, 34816 x 5120, 1",
]
MAX_SPILLED = {"attend 27B, prompt in 64": 256}  # bytes: fastest so (log 155); of all others nothing
IN_CODES = [
    f"{name} 27B, 34816 x 5120, {num_tokens}"
    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "NVFP4", "AWQ")
    for num_tokens in (1, 2, 4, 16, 64)
] + [f"Q4_K 35B-A3B experts, {num_tokens}" for num_tokens in (1, 64, 1024)]
KV_IN_FP8 = [
    "rope 27B, KV in fp8, 4",
    "rope 27B, KV in fp8, 2048",
    "attend 27B, KV in fp8, 1 row of 1",
    "attend 27B, KV in fp8, 1 short row of 4",
    "attend 27B, KV in fp8, 1 row of 8",
    "attend 27B, KV in fp8, 64 rows of 4",
    "attend 27B, KV in fp8, prompt in 16",
    "attend 27B, KV in fp8, prompt in 64",
    "attend SmolLM2, KV in fp8, 64 rows of 4",
    "attend 128 channels, KV in fp8, 1 row of 4",
    "attend 128 channels, KV in fp8, prompt in 64",
    "attend SmolLM2 in float32, KV in fp8",
]
HEAVIEST = [
    "fused 27B",
    "head entry 27B",
    "rope 27B, 2048",
    "attend 27B, 1 row of 4",
    "int8 27B, 34816 x 5120, 16",
    "int8 27B, 34816 x 5120, 512",
    "int8 27B, 5120 x 17408, 64",
    "fp8 27B, 16480 x 5120, 64",
    "fp8 27B, 5120 x 17408, 256",
    "fp8 27B fused, 64",
    "wide fp8 27B fused, 1",
    "wide fp8 35B-A3B experts, 64",
    "int8 35B-A3B experts, 1",
    "int4 35B-A3B experts, 4096",
    "int4 27B, 34816 x 5120, 1",
    "int4 27B, 34816 x 5120, 256",
    "int4 27B, 5120 x 17408, 64",
]


OTHERS = [
    *(
        f"{name} 27B, 34816 x 5120, {num_tokens}"
        for name in ("Q4_K", "Q6_K", "Q8_0", "AWQ")
        for num_tokens in (1, 4, 64)
    ),
    *(f"{kind} 27B, 34816 x 5120, {num_tokens}" for kind in ("int4", "fp8", "wide fp8") for num_tokens in (1, 64)),
    *(f"{kind} 35B-A3B experts, {num_tokens}" for kind in ("Q4_K", "int4", "fp8") for num_tokens in (1, 1024)),
    *(f"35B-A3B experts, {num_tokens}" for num_tokens in (1, 8192)),
    *("fused 27B", "int8 27B fused, 1", "int8 27B, 34816 x 5120, 64", "IQ4_XS 27B, 34816 x 5120, 16"),
    *("attend 27B, 1 short row of 1", "attend 27B, 1 short row of 4", "attend 27B, 1 row of 8"),
    *("attend 27B, 64 rows of 4", "attend 27B, prompt in 64", "attend 128 channels, prompt in 64"),
    *("attend 27B in float32, prompt in 64", "recurrence 27B, 16 rows of 4", "recurrence 27B, prompts", "tiny server"),
]
NARROW_STATES = [
    f"recurrence 27B, states in {name}, {rows}"
    for name in ("float16", "bfloat16")
    for rows in ("1 row of 4", "16 rows of 4", "prompts")
]
FEW_SPILLED = 640  # bytes: where tensor cores take their operands from registers, with many tokens


@pytest.mark.parametrize(
    "cases",
    [
        ONE_OF_A_KIND,
        pytest.param(HEAVIEST, marks=pytest.mark.exhaustive),
        pytest.param(IN_CODES, marks=pytest.mark.exhaustive),
    ],
    ids=["one of a kind", "all others", "in codes"],
)
def test_the_heaviest_launches_compile_without_spilling(cases: list[str], tmp_path: Path) -> None:
    for launch in compiled(cases, 90, tmp_path):
        assert launch["waits"], launch
        assert launch["spilled_bytes"] <= MAX_SPILLED.get(launch["case"], 16 if launch["case"] in IN_CODES else 0), (
            launch
        )
        assert launch["shared_bytes"] <= GPUS[90].shared_bytes, launch


@pytest.mark.parametrize(
    ("cases", "capability"),
    [
        (KV_IN_FP8[2:3], 80),  # a GPU that converts no e4m3
        (KV_IN_FP8[4:5], 90),
        *(pytest.param(KV_IN_FP8, each, marks=pytest.mark.exhaustive) for each in GPUS),
    ],
)
def test_attention_over_fp8_compiles_for_every_gpu(cases: list[str], capability: int, tmp_path: Path) -> None:
    for launch in compiled(cases, capability, tmp_path):
        assert launch["waits"] == GPUS[capability].has_pdl, launch
        assert launch["spilled_bytes"] <= FEW_SPILLED, launch
        assert launch["shared_bytes"] <= GPUS[capability].shared_bytes, launch


@pytest.mark.parametrize(
    ("cases", "capability"),
    [
        (NARROW_STATES[1:2], 90),
        *(pytest.param(NARROW_STATES, each, marks=pytest.mark.exhaustive) for each in GPUS),
    ],
)
def test_states_in_16_bits_compile_for_every_gpu(cases: list[str], capability: int, tmp_path: Path) -> None:
    launches = compiled(cases, capability, tmp_path)
    assert {"_conv", "_recur"} <= {launch["kernel"] for launch in launches}
    for launch in launches:
        assert launch["spilled_bytes"] <= (0 if launch["kernel"] == "_recur" else FEW_SPILLED), launch
        assert launch["shared_bytes"] <= GPUS[capability].shared_bytes, launch


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 86, 89, 120])
def test_all_kernels_compile_for_other_gpus(capability: int, tmp_path: Path) -> None:
    """And fit into their shared memory: a launch that does not is refused by the driver."""
    gpu = GPUS[capability]
    for launch in compiled(OTHERS, capability, tmp_path):
        assert launch["shared_bytes"] <= gpu.shared_bytes, launch
        assert launch["spilled_bytes"] <= FEW_SPILLED, launch
        assert launch["waits"] <= gpu.has_pdl, launch


FP8_PRODUCTS = (89, 90, 120)  # compute capabilities that have them
FP8_CASES = ["fp8 x fp8 27B, 16480 x 5120, 256", "fp8 x fp8 27B gated, 64", "fp8 x fp8 27B normed, 1"]
FP8_CASES += ["fp8 x fp8 35B-A3B experts, 1", "fp8 x fp8 35B-A3B experts, 1024"]
FP8_CASES += ["fp8 x fp8 35B-A3B experts, 4096"]
IN_BLOCKS = [f"fp8 x fp8 27B in blocks, {num_tokens}" for num_tokens in (64, 256)]  # elsewhere as any others


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in FP8_PRODUCTS if each != 90)]
)
def test_fp8_products_are_those_of_the_tensor_cores(capability: int, tmp_path: Path) -> None:
    for launch in compiled(FP8_CASES + (IN_BLOCKS if capability == 90 else []), capability, tmp_path):
        assert launch["waits"] == GPUS[capability].has_pdl, launch
        assert launch["fp8_products"] == launch["kernel"].startswith("_fp8"), launch
        assert launch["spilled_bytes"] <= (0 if capability == 90 else 64), launch
        assert launch["shared_bytes"] <= GPUS[capability].shared_bytes, launch


def compiled(cases: list[str], capability: int, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(SCRIPT.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(SCRIPT), "--capability", str(capability), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    launches: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {launch["case"] for launch in launches} == set(cases)
    return launches
