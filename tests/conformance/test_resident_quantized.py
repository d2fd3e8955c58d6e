"""Quantised files on the device-resident runner, from the file to the tokens: what it says of them is what
`transformers` says with the weights that the file stands for, and greedy tokens with the head are those without.

On a GPU, or on the CPU in Triton's interpreter, which is slow: models of a layer of each kind, and short texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import tiny
import tiny_gguf
import tiny_packed
import torch
from conversations import SMALL
from harness import Ask, Traffic, open_gguf_runner, open_resident, target_logits
from test_gguf import mixed
from test_resident import ON_GPU
from tiny_gguf import Options
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config import EngineConfig
from slipstream.engine import prefix_sharing
from slipstream.runners.cuda.model.coded import CodedExperts, CodedLinear, CodedStack
from slipstream.runners.cuda.model.fp8_choice import parts_in
from slipstream.runners.cuda.model.quantized import CudaQuantizedLinear
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.runners.torch.ops import ReorderedLinear
from slipstream.sampling import SamplingParams

pytest.importorskip("triton")
CONFIG = EngineConfig(max_streams=4, max_step_tokens=40, min_chunk=4, block_size=8)
DEPTH = 3  # one stream with drafts has four tokens in a step: as many as are multiplied in whole numbers
DRAFT_VOCAB = 80  # the head's output matrix are the first rows of the model's
SHORT = {"num_hidden_layers": 2, "full_attention_interval": 2}
PROMPT = tuple(range(3, 12))
GREEDY = Ask(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, seed=0, prompt_logprobs=5, logprobs=5))
TOLERANCE = 1e-3  # in float32
HOT = Ask((5, 6), SamplingParams(temperature=20.0, max_tokens=4, seed=5))  # so hot that drafts are often right


@dataclass(frozen=True)
class File:
    """``save`` gives its path, and the model with its weights."""

    save: Callable[[Path], tuple[Path, PreTrainedModel]]
    parts: set[type]  # of which the runner's model is then made, among others


def folder(name: str, *parts: type, **more: int) -> File:
    layout = tiny_packed.LAYOUTS[name]
    sizes = {} if layout.model == "qwen2" else SHORT | more
    return File(lambda path: (path, tiny_packed.save(layout, path, **sizes)), set(parts))


def gguf(build: Callable[[], PreTrainedModel], kind: Callable[[str], str], *parts: type) -> File:
    def save(path: Path) -> tuple[Path, PreTrainedModel]:
        model = build()
        twin = tiny_gguf.write(model, path / "x.gguf", Options(kind))
        return twin.path, tiny_gguf.load(model, twin)

    return File(save, set(parts))


def several_types(name: str) -> str:
    """Also within an expert."""
    return {"ffn_gate_exps": "Q5_K", "ffn_down_exps": "Q6_K", "ffn_up_exps": "IQ4_XS"}.get(name.split(".")[-2], "Q8_0")


def short_blocks(name: str) -> str:
    kinds = {"attn_qkv": "Q8_0", "attn_gate": "Q4_1", "ssm_out": "IQ4_NL", "ffn_down": "Q5_0"}
    return kinds.get(name.split(".")[-2], "Q4_0")


# Where 128 columns share a scale matrices stay in FP8, with scales in float32 as well (decision 15).
FP8 = {"hidden_size": 128, "linear_value_head_dim": 32}
FEW_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
NARROW = {**FEW_HEADS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "linear_num_value_heads": 6}
FILES = {
    "gptq-act-order": folder("gptq-act-order", ReorderedLinear, CodedLinear),
    "quanttrio-awq": folder("quanttrio-awq", CodedExperts, CodedLinear),
    "redhat-nvfp4": folder("redhat-nvfp4", CodedExperts, CodedLinear),
    "nvidia-nvfp4": folder("nvidia-nvfp4", CodedExperts, CudaQuantizedLinear, **FP8),
    "unsloth-nvfp4": folder("unsloth-nvfp4", CodedExperts, CudaQuantizedLinear, **FP8),
    "next-gptq": folder("next-gptq", CodedExperts),
    "q4_k_m": gguf(lambda: tiny_gguf.wide(**SHORT), mixed, CodedStack),
    "short blocks": gguf(lambda: tiny_gguf.wide(**NARROW, **SHORT), short_blocks, CodedStack),
    "moe": gguf(lambda: tiny_gguf.wide(True, **FEW_HEADS, **SHORT), several_types, CodedExperts),
    "next": gguf(lambda: tiny_gguf.qwen3_next(**SHORT), mixed, CodedExperts),
}
OTHERS = {
    name: folder(name, **(FP8 if "fp8" in str(layout.rules) else {}))
    for name, layout in tiny_packed.LAYOUTS.items()
    if name not in FILES and layout.has_head
}


def slow(names: Iterable[str], quick: str) -> list[object]:
    return [name if name == quick or ON_GPU else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


def check_parts(runner: CudaRunner, file: File) -> None:
    found = {type(part) for part in parts_in((runner.decoder, runner.program.drafter))}
    assert file.parts <= found, file.parts - found
    assert found & {CodedLinear, CodedExperts, CudaQuantizedLinear}


def with_drafts_and_without(runner: CudaRunner, asks: list[Ask]) -> tuple[Traffic, Traffic]:
    runs = Traffic(runner, CONFIG), Traffic(runner, CONFIG)
    for run, draft in zip(runs, (DEPTH, "off"), strict=True):
        for _ in range(3 if ON_GPU else 1):  # as it is, while being captured, replayed
            run.run([replace(ask, params=replace(ask.params, draft=draft)) for ask in asks])
    assert runs[0].snapshot.num_draft_tokens > 0
    return runs


def opinion(model: PreTrainedModel, run: Traffic) -> Tensor:
    """Its log-probabilities wherever the run reports some. [positions, vocab]"""
    tokens = torch.tensor([[*PROMPT, *run.tokens["0"]]])
    with torch.no_grad():
        logits: Tensor = model(tokens).logits[0, :-1]
    assert logits.std() > 0.3, "logits so flat that anything would agree"
    return logits.float().log_softmax(-1)


def distances(run: Traffic, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """How far the reported log-probabilities are off at most, and their tokens. [positions], [positions, tokens]"""
    reported = run.logprobs["0"]
    sequence = [*PROMPT, *run.tokens["0"]][-len(reported) :]
    pairs = [[(token, each.logprob), *each.top] for token, each in zip(sequence, reported, strict=True)]
    tokens, values = (torch.tensor([[pair[which] for pair in at] for at in pairs]) for which in (0, 1))
    return (values - wanted.gather(1, tokens)).abs().amax(1), tokens


def check_greedy(runs: Sequence[Traffic], wanted: Sequence[Tensor], slack: float) -> None:
    """Each token is the most likely one, and both runs have the same, but for near-ties."""
    first = len(PROMPT) - 1
    for run, known in zip(runs, wanted, strict=True):
        for at, token in enumerate(run.tokens["0"], first):
            assert known[at].max() - known[at, token] <= slack
    some, others = (run.tokens["0"] for run in runs)
    if some != others:
        at = next(at for at in range(len(some)) if some[at] != others[at])
        assert abs(wanted[0][first + at, some[at]] - wanted[0][first + at, others[at]]) <= slack


@pytest.mark.parametrize("name", slow(FILES | OTHERS, "gptq-act-order"))
def test_in_float32_nothing_is_rounded(tmp_path: Path, name: str) -> None:
    file = (FILES | OTHERS)[name]
    path, model = file.save(tmp_path)
    runner = open_resident(path, rounded="stored", max_depth=DEPTH, draft_vocab=DRAFT_VOCAB)
    check_parts(runner, file)
    runs = drafted, plain = with_drafts_and_without(runner, [GREEDY, HOT])
    wanted = [opinion(model, run) for run in runs]
    for run, known in zip(runs, wanted, strict=True):
        assert distances(run, known)[0].max() < TOLERANCE
    check_greedy(runs, wanted, 2 * TOLERANCE)
    assert drafted.tokens["1"] == plain.tokens["1"]
    assert drafted.snapshot.num_accepted_tokens > 0


@pytest.mark.parametrize("name", slow(FILES, "quanttrio-awq"))
def test_in_bfloat16_as_close_as_transformers(tmp_path: Path, name: str) -> None:
    """The prompt is multiplied by weights in bfloat16, single tokens and drafts are by codes. A token may have another
    expert than in float32: medians."""
    file = FILES[name]
    path, model = file.save(tmp_path)
    runner = open_resident(path, dtype="auto", max_depth=DEPTH, draft_vocab=DRAFT_VOCAB)
    check_parts(runner, file)
    runs = with_drafts_and_without(runner, [GREEDY])
    half = copy.deepcopy(model).bfloat16()
    slack, wanted = 0.0, [opinion(model, run) for run in runs]
    for run, known in zip(runs, wanted, strict=True):
        (off, tokens), theirs = distances(run, known), opinion(half, run)
        expected = (theirs - known).gather(1, tokens).abs().amax(1)
        for part in (slice(0, len(PROMPT)), slice(len(PROMPT), None)):
            assert off[part].median() < 3 * expected.median()
        slack = max(slack, 4 * float(expected.max()))
    check_greedy(runs, wanted, slack)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtype", "tolerance"), [("q4_k_m", "float32", 1e-3), ("short blocks", "auto", 0.1)])
def test_a_cached_prefix_beside_narrow_caches(tmp_path: Path, name: str, dtype: str, tolerance: float) -> None:
    """Keys and values in FP8, as the CPU runner has them; states in 16 bits, and a request that continues another."""
    path, _ = FILES[name].save(tmp_path)
    stored = "stored" if dtype == "float32" else None
    more = {"kv_dtype": "fp8", "state_dtype": "float16"}
    runner = open_resident(path, dtype=dtype, rounded=stored, max_depth=DEPTH, **more)
    params = replace(GREEDY.params, prompt_logprobs=None, draft=DEPTH)
    cold, asks = [], [Ask(tuple(7 * i % tiny.VOCAB for i in range(34)), params)]
    for _ in range(2):
        cold.append(Traffic(runner, replace(CONFIG, prefix_cache=False)))
        cold[-1].run(asks[-1:])
        asks.append(Ask((*asks[-1].prompt, *cold[-1].tokens["0"], 5, 6), params, arrival=30))
    warm = Traffic(runner, CONFIG)
    with patch.multiple(prefix_sharing, **SMALL):
        warm.run(asks[:2])
    stats = warm.finished["1"].stats
    assert stats is not None
    assert stats.cached_tokens == runner.info.keep_grid
    exact = open_gguf_runner(path, kv_dtype="fp8")
    for i, run in enumerate(cold):
        assert warm.tokens[str(i)] == run.tokens["0"]
        got, known = ([each.logprob for each in found] for found in (warm.logprobs[str(i)], run.logprobs["0"]))
        assert got == pytest.approx(known, abs=tolerance)
        sequence = [*asks[i].prompt, *run.tokens["0"]]
        logits = target_logits(exact, sequence, [len(sequence)])[len(asks[i].prompt) - 1 : -1]
        assert distances(run, logits.log_softmax(-1))[0].max() < tolerance
