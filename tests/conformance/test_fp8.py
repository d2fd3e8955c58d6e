"""FP8 folders end to end: float32 logits equal `transformers`' on the same folder, packed ones come close.

transformers multiplies the scales in while it loads (FineGrainedFP8Config.dequantize), on a CPU as well. It takes
matrices of whole blocks only, and experts one by one; other folders are handed to it multiplied out, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_fp8
import torch
from harness import Ask, Traffic, alone, open_runner, target_logits
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from slipstream.config import EngineConfig
from slipstream.sampling import SamplingParams

TOKENS = torch.randint(0, tiny.VOCAB, (90,), generator=torch.Generator().manual_seed(3)).tolist()
FEEDS = [5, 17, 1, 1, 1, 3, 62]
STACKED = "qwen3_5_moe-odd-stacked"
KINDS = [*tiny_fp8.MODELS, STACKED]
# Of the logits' length. FP8 itself moved those of the tiny hybrid models by 0.25, 8-bit blocks by 0.05, BF16 by 0.015.
CLOSE = {"auto": 0.1, "bfloat16": 0.03}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in KINDS:
        model = tiny_fp8.build(kind.removesuffix("-stacked"))
        made[kind] = tiny_fp8.save(model, tmp_path_factory.mktemp(kind), stacked=kind == STACKED)
    return made


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """transformers' logits. [tokens, vocab]"""
    found = {}
    for kind, folder in folders.items():
        read = FineGrainedFP8Config(dequantize=True) if kind in tiny_fp8.WHOLE else None
        where = folder if read else tiny_fp8.save_floats(folder, tmp_path_factory.mktemp(kind))
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, quantization_config=read)
        with torch.no_grad():
            found[kind] = model.float()(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(
    folders: dict[str, Path], expected: dict[str, torch.Tensor], kind: str, kernels: bool
) -> None:
    logits = target_logits(open_runner(folders[kind], kernels=kernels), TOKENS, FEEDS)
    assert expected[kind].std() > 0.3, "logits so flat that anything would agree"
    torch.testing.assert_close(logits, expected[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "moe" not in kind])  # a router may tip over
def test_packed_logits_are_close(
    folders: dict[str, Path], expected: dict[str, torch.Tensor], kind: str, dtype: str
) -> None:
    logits = target_logits(open_runner(folders[kind], dtype=dtype, kernels=True), TOKENS, FEEDS)
    off = (logits - expected[kind]).norm() / expected[kind].norm()
    assert 1e-5 < off < CLOSE[dtype]


@pytest.mark.each_value
@pytest.mark.parametrize(("dtype", "kernels"), [("float64", False), ("auto", True)], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(folders: dict[str, Path], kind: str, dtype: str, kernels: bool) -> None:
    runner = open_runner(folders[kind], head=True, dtype=dtype, kernels=kernels)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, seed=1, draft=3)
    asks = [Ask(tuple(TOKENS[:20]), greedy), Ask(tuple(TOKENS[20:27]), greedy, arrival=3)]
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    got = traffic.run(asks)
    assert got == [alone(runner, ask) for ask in asks]
    assert traffic.snapshot.num_draft_tokens > 0
