"""A random shape's GGUF twin: llama.cpp, where it is installed, thinks of its tokens what we think of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, ReaderTensor

from slipstream.bench.harness.gguf_twin import write_stored, write_twin
from slipstream.bench.harness.llamacpp_peer import LlamaCppAnswer, open_peer
from slipstream.bench.harness.workload import random_prompt
from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.load import open_model
from slipstream.load.dequantize import dequantize
from slipstream.load.random.model import RANDOM_SHAPES, RandomCheckpoint, random_model
from slipstream.load.random.stored import StoredRandomCheckpoint
from slipstream.load.spec import GdnSpec, ModelSpec, RopeSpec
from slipstream.runners.cpu.quantize import q8_0_blocks
from slipstream.runners.cpu.twin import dequantized
from slipstream.runners.torch.backend import TorchBackend
from slipstream.sampling import SamplingParams

TINY = RANDOM_SHAPES["tiny"]
SPECS = {
    "three value heads a key head": replace(TINY, gdn=GdnSpec(2, 6, 16, 16, 4)),
    "heads as large as real ones": replace(
        TINY,
        tied=True,
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        rope=RopeSpec(1e7, 64),
        gdn=GdnSpec(2, 2, 128, 128, 4),
    ),
    "experts": RANDOM_SHAPES["tiny-moe"],
}
ROUNDED = [name for name in SPECS if name != "experts"]  # a rounded activation may choose another expert
LIMITS = {"float32": 2e-3, "auto": 0.5, "int8": 0.6}  # llama.cpp rounds activations to its matrices' type, or near it
NUM_NEW = 24
NUM_LIKELIEST = 5


def ours(spec: ModelSpec, dtype: str) -> LLM:
    engine = EngineConfig(max_streams=4, draft="off")
    return LLM.from_config(random_model(spec), engine, RunnerConfig(device="cpu", dtype=dtype, runner="torch"))


def theirs(path: Path, prompts: list[list[int]]) -> list[LlamaCppAnswer]:
    with open_peer(path, 2, True, 128) as peer:
        assert peer is not None
        return peer.generate(prompts, NUM_NEW, ignore_eos=True, num_likeliest=NUM_LIKELIEST)


def check_same(llm: LLM, prompt: list[int], answer: LlamaCppAnswer, limit: float) -> int:
    """Place by place along the peer's own greedy answer. Returns at how many our own choice was clear."""
    chosen = [place[0][0] for place in answer.likeliest]
    [read] = llm.generate([[*prompt, *chosen]], SamplingParams(0.0, max_tokens=1, prompt_logprobs=20))
    num_clear = 0
    for mine, place in zip(read.prompt_logprobs[len(prompt) - 1 :], answer.likeliest, strict=True):
        report = dict(mine.top)
        assert max(abs(report[token] - logprob) for token, logprob in place) < limit
        (best, first), (_, second) = mine.top[:2]
        if first - second > limit:
            num_clear += 1
            assert best == place[0][0]
    return num_clear


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in SPECS] + [(name, dtype) for name in ROUNDED for dtype in ("auto", "int8")],
)
def test_llama_cpp_finds_the_same_tokens_as_likely_as_we_do(name: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    path = tmp_path / "twin.gguf"
    write_twin(RandomCheckpoint(SPECS[name]), TorchBackend(RunnerConfig("cpu", dtype)), path)
    prompts = [random_prompt(40, TINY.vocab_size, seed) for seed in range(4)]
    answers = theirs(path, prompts)
    assert [answer.num_tokens for answer in answers] == [NUM_NEW] * 4
    with ours(SPECS[name], dtype) as llm:
        num_clear = sum(check_same(llm, *each, LIMITS[dtype]) for each in zip(prompts, answers))
        alone = llm.generate(prompts, SamplingParams(0.0, max_tokens=NUM_NEW))
    if dtype == "float32":
        assert num_clear > 0.9 * 4 * NUM_NEW
        same = [list(mine.token_ids) == [place[0][0] for place in a.likeliest] for mine, a in zip(alone, answers)]
        assert any(same), "no answer is the same to its end"


def tensors(spec: ModelSpec, dtype: str, path: Path) -> dict[str, ReaderTensor]:
    write_twin(RandomCheckpoint(spec), TorchBackend(RunnerConfig("cpu", dtype)), path)
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("name", SPECS)
def test_matrices_are_rounded_as_the_runner_rounds_them(name: str, tmp_path: Path) -> None:
    exact = tensors(SPECS[name], "float32", tmp_path / "exact.gguf")
    rounded = tensors(SPECS[name], "int8", tmp_path / "rounded.gguf")
    assert exact.keys() == rounded.keys()
    types = {tensor.tensor_type.name for tensor in rounded.values()}
    assert types == {"F32", "Q8_0"}
    for tensor in rounded.values():
        wide = torch.tensor(exact[tensor.name].data)
        blocks = q8_0_blocks(wide.flatten(0, -2)) if wide.ndim > 1 and wide.shape[-1] % 32 == 0 else wide
        if tensor.tensor_type.name == "Q8_0":
            assert torch.equal(blocks, torch.tensor(tensor.data).flatten(0, -2)), tensor.name
        elif "ffn_gate_inp" in tensor.name:
            assert np.array_equal(tensor.data.ravel(), dequantized(q8_0_blocks(wide.view(-1, 64))).numpy().ravel())
        else:
            assert np.array_equal(tensor.data, exact[tensor.name].data), tensor.name


def test_only_what_a_cpu_stores_has_a_twin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not fp8"):
        write_twin(RandomCheckpoint(TINY), TorchBackend(RunnerConfig("cpu", "fp8")), tmp_path / "twin.gguf")


@pytest.mark.parametrize("stored_as", ["Q4_K_M", "IQ4_XS"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_types_of_quantised_files_are_written_as_we_read_them(shape: str, stored_as: str, tmp_path: Path) -> None:
    spec = RANDOM_SHAPES[shape]
    made_up = StoredRandomCheckpoint(spec, stored_as)
    write_stored(made_up, tmp_path / "model.gguf")
    read = open_model(str(tmp_path / "model.gguf")).checkpoint
    for name in made_up.names():
        if spec.head.owns(name):
            assert name not in read
            continue
        assert read.dtype(name) == made_up.dtype(name)
        np.testing.assert_allclose(dequantize(read.get(name)), dequantize(made_up.get(name)), rtol=1e-6, atol=1e-7)
