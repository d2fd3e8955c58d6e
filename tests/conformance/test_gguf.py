"""GGUF files of Qwen3.5 and Qwen3-Next: float32 logits equal `transformers`' with the very numbers of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from harness import Ask, Traffic, alone, open_gguf_runner, target_logits
from tiny_gguf import Options
from transformers import PreTrainedModel

from slipstream.config import EngineConfig
from slipstream.errors import CorruptFile, HeadError, LoadError, UnknownModel
from slipstream.load import dequantize, open_model
from slipstream.load.head import head_shapes
from slipstream.load.quantized.gguf_blocks import BLOCK_TYPES
from slipstream.load.random.model import RANDOM_SHAPES
from slipstream.load.read_ahead import places_in_order
from slipstream.load.shapes import ExpertLayout, model_shapes
from slipstream.sampling import SamplingParams

TOKENS = torch.randint(0, tiny.VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()
FEEDS = [5, 17, 1, 1, 36]
MODELS = {
    "dense": lambda: tiny_gguf.wide(),
    "dense-three-values": lambda: tiny_gguf.wide(linear_num_value_heads=6, linear_key_head_dim=128),
    "dense-equal-heads-tied": lambda: tiny_gguf.wide(linear_num_key_heads=4, tie_word_embeddings=True),
    "dense-yarn": lambda: tiny_gguf.wide(rope_parameters={**tiny.YARN, "partial_rotary_factor": 0.25}),
    "moe": lambda: tiny_gguf.wide(moe=True),
    "next": lambda: tiny_gguf.qwen3_next(),
}
TYPES = ["F16", "BF16", *(name for name in BLOCK_TYPES if name not in ("Q1_0", "Q2_0"))]  # which gguf does not know


def mixed(name: str) -> str:
    """As in a Q4_K_M file."""
    if "ffn_down" in name or "attn_v" in name or name == "output.weight":
        return "Q6_K"
    if "attn_qkv" in name:
        return "Q5_K"
    return "Q8_0" if "ssm_alpha" in name or "ssm_beta" in name else "Q4_K"


def expected(model: PreTrainedModel, twin: tiny_gguf.Twin) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = tiny_gguf.load(model, twin)(torch.tensor([TOKENS])).logits[0]
    assert logits.std() > 0.3, "logits so flat that anything would agree"
    return logits


def check(model: PreTrainedModel, twin: tiny_gguf.Twin, *, path: Path | None = None, kernels: bool = False) -> None:
    wanted = expected(model, twin)
    logits = target_logits(open_gguf_runner(path or twin.path, kernels=kernels), TOKENS, FEEDS)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", MODELS)
def test_floats(tmp_path: Path, kind: str, kernels: bool) -> None:
    model = MODELS[kind]()
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf"), kernels=kernels)


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_a_mixture_of_block_types(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind]()
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf", Options(mixed)))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_packed_logits_are_close(tmp_path: Path, kind: str) -> None:
    """As the CPU runner packs them where nothing else is asked for."""
    model = MODELS[kind]()
    twin = tiny_gguf.write(model, tmp_path / "x.gguf", Options(mixed))
    wanted = expected(model, twin)
    logits = target_logits(open_gguf_runner(twin.path, dtype="auto", kernels=True), TOKENS, FEEDS)
    assert (logits - wanted).norm() / wanted.norm() < 0.1


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type(tmp_path: Path, dtype: str) -> None:
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf", Options(lambda name: dtype, head=False)))


def test_numbers_beside_the_stacks_of_experts(tmp_path: Path) -> None:
    model = MODELS["moe"]()
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf", Options(lambda name: "NVFP4")))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("moe", Options(fused=True, gate_rank=2)),
        ("next", Options(mixed, legacy=True)),
        ("dense", Options(time_step="ssm_dt", metadata=(("qwen35.attention.head_count_kv", [0, 0, 0, 2, 2]),))),
        ("dense", Options(metadata=(("qwen35.full_attention_interval", None),))),
    ],
    ids=["fused", "legacy", "ollama", "default interval"],
)
def test_ways_to_write_the_same(tmp_path: Path, kind: str, options: Options) -> None:
    model = MODELS[kind]()
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf", options))


def test_named_recurrent_layers_win_over_the_interval(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = tiny_gguf.wide(layer_types=kinds)
    flags = [each == "linear_attention" for each in (*kinds, "full_attention")]
    options = Options(metadata=(("qwen35.attention.recurrent_layers", flags),))
    check(model, tiny_gguf.write(model, tmp_path / "x.gguf", options))


def test_split_into_parts(tmp_path: Path) -> None:
    model = MODELS["dense"]()
    twin = tiny_gguf.write(model, tmp_path / "x.gguf", Options(parts=3))
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    opened = open_model(str(parts[0]))
    assert opened.checkpoint.files() == parts
    assert opened.num_bytes == sum(4 * weight.numel() for weight in twin.state.values())
    places = places_in_order(opened)
    assert [place.path for place in places] != [places[0].path] * len(places)
    assert sum(place.stop - place.start for place in places) == opened.num_bytes
    for part in parts[:2]:
        check(model, twin, path=part)
    parts[2].rename(tmp_path / "away")
    with pytest.raises(LoadError, match=r"x-00003-of-00003\.gguf is missing"):
        open_model(str(parts[0]))
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CorruptFile, match="is not part 3 of 3"):
        open_model(str(parts[0]))
    lonely = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(LoadError, match=r"found by names like model-00001-of-00003\.gguf"):
        open_model(str(lonely))


def test_the_tokens_that_end_a_turn(tmp_path: Path) -> None:
    """The file names one of them."""
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    tokens = ["<|endoftext|>", "a", "<|im_end|>", "<|im_start|>", *(f"[{i}]" for i in range(4, tiny.VOCAB))]
    types = [3, 1, 3, 3, *[1] * (tiny.VOCAB - 4)]
    vocabulary = (("tokenizer.ggml.tokens", tokens), ("tokenizer.ggml.token_type", types))
    more = (("tokenizer.ggml.eos_token_id", 2), ("general.sampling.temp", 0.6), ("general.sampling.top_k", 20))
    opened = open_model(str(tiny_gguf.write(model, tmp_path / "x.gguf", Options(metadata=(*vocabulary, *more))).path))
    assert opened.spec.eos_token_ids == (2, 0)
    assert (opened.sampling_defaults.temperature, opened.sampling_defaults.top_k) == (0.6, 20)


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, seed=1, draft=3)
ASKS = [Ask(tuple(TOKENS[:20]), GREEDY), Ask(tuple(TOKENS[20:27]), GREEDY, arrival=3)]


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_drafts_change_no_token(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind]()
    runner = open_gguf_runner(tiny_gguf.write(model, tmp_path / "x.gguf", Options(mixed)).path, dtype="float64")
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    assert traffic.run(ASKS) == [alone(runner, ask) for ask in ASKS]
    assert traffic.snapshot.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_the_head_is_that_of_a_folder(tmp_path: Path, kind: str) -> None:
    """Each of its tensors, under its canonical name."""
    model = MODELS[kind]()
    twin = tiny_gguf.write(model, tmp_path / "x.gguf")
    head = open_model(str(twin.path)).head
    assert head is not None
    wanted = {name: weight for name, weight in twin.state.items() if name.startswith("mtp.")}
    for name, weight in wanted.items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            found = torch.cat([torch.from_numpy(dequantize(head.get(f"{stem}.{p}_proj"))) for p in ("gate", "up")], 1)
        else:
            found = torch.from_numpy(dequantize(head.get(name)))
        torch.testing.assert_close(found, weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("place", ["given", "mtp-x-Q8_0.gguf", "MTP/mtp-x-Q8_0.gguf"])
def test_a_head_in_a_file_of_its_own(tmp_path: Path, place: str) -> None:
    model = MODELS["dense"]()
    target = tiny_gguf.write(model, tmp_path / "x-Q4_K_M.gguf", Options(head=False)).path
    assert open_model(str(target)).head is None
    path = tmp_path / ("elsewhere.gguf" if place == "given" else place)
    path.parent.mkdir(exist_ok=True)
    tiny_gguf.write(model, path, Options(lambda name: "Q8_0", trunk=False))
    opened = open_model(str(target), str(path) if place == "given" else None)
    assert opened.head is not None
    assert opened.head.files() == [path]
    assert opened.head.dtype("mtp.fc.weight") == "Q8_0"
    runner = open_gguf_runner(target, mtp=path if place == "given" else None, dtype="float64")
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    assert traffic.run(ASKS) == [alone(runner, ask) for ask in ASKS]
    assert traffic.snapshot.num_draft_tokens > 0
    with pytest.raises(UnknownModel, match="is an MTP head without its model"):
        open_model(str(path))


def test_of_several_heads_beside_a_model_the_likest_that_fits(tmp_path: Path) -> None:
    model, other = MODELS["dense"](), tiny_gguf.wide(hidden_size=512)
    target = tiny_gguf.write(model, tmp_path / "Qwen-9B-Q4_K_M.gguf", Options(head=False)).path
    tiny_gguf.write(other, tmp_path / "mtp-Qwen-9B-bad.gguf", Options(trunk=False))
    tiny_gguf.write(model, tmp_path / "mtp-Alpha-9B.gguf", Options(trunk=False))
    likest = tiny_gguf.write(model, tmp_path / "mtp-qwen-9B-F32.gguf", Options(trunk=False)).path
    (tmp_path / "mtp-Qwen-9B-Q4_K_damaged.gguf").write_bytes(b"GGUF")
    head = open_model(str(target)).head
    assert head is not None
    assert head.files() == [likest]


def test_a_gguf_head_for_a_folder(tmp_path: Path) -> None:
    """And a folder's for a GGUF: names and norms are the same ones."""
    model = MODELS["dense"]()
    folder = tiny.save(model, tmp_path / "folder")
    head = tiny_gguf.write(model, tmp_path / "mtp-x.gguf", Options(trunk=False)).path
    opened = open_model(str(folder), str(head))
    assert opened.head_reason == ""
    whole = tiny.save(model, tmp_path / "whole", head=True)
    target = tiny_gguf.write(model, tmp_path / "sub.gguf", Options(head=False)).path
    assert open_model(str(target), str(whole)).head_reason == ""


def test_a_file_without_a_head_is_no_head(tmp_path: Path) -> None:
    model = MODELS["dense"]()
    target = tiny_gguf.write(model, tmp_path / "x.gguf", Options(head=False)).path
    with pytest.raises(HeadError, match=r"holds no nextn\.\* tensors"):
        open_model(str(target), str(target))


def test_what_is_left_out_and_what_is_not_known(tmp_path: Path) -> None:
    """The vision tower, inputs' scales, parts of a head that Qwen's do not have."""
    model = tiny_gguf.wide(num_hidden_layers=2, full_attention_interval=2)
    known = ("v.blk.0.attn_q.weight", "mm.0.weight", "blk.0.attn_gate.input_scale", "blk.2.nextn.embed_tokens.weight")
    opened = open_model(str(tiny_gguf.write(model, tmp_path / "x.gguf", Options(more=known)).path))
    assert opened.head is not None
    assert len(list(opened.checkpoint.names())) == len(tiny_gguf.head_of(model)) + len(model.state_dict())
    other = tiny_gguf.write(model, tmp_path / "y.gguf", Options(more=("blk.0.attn_sinks.weight",)))
    with pytest.raises(UnknownModel, match=r"'blk\.0\.attn_sinks\.weight', which is not part of qwen3_5 models"):
        open_model(str(other.path))


def test_a_head_without_a_norm_of_its_own_has_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["dense"]()
    head = {name: weight for name, weight in tiny_gguf.head_of(model).items() if name != "mtp.norm.weight"}
    monkeypatch.setattr(tiny_gguf, "head_of", lambda model: head)
    twin = tiny_gguf.write(model, tmp_path / "x.gguf")
    found = open_model(str(twin.path)).head
    assert found is not None
    torch.testing.assert_close(torch.from_numpy(found.get("mtp.norm.weight").data), twin.state["model.norm.weight"])


@pytest.mark.parametrize(
    ("shape", "layout", "target", "head"), [("qwen3.5-27b", "fused", 851, 15), ("qwen3.5-35b-a3b", "stacks", 733, 20)]
)
def test_as_many_tensors_as_the_published_files(shape: str, layout: ExpertLayout, target: int, head: int) -> None:
    spec = RANDOM_SHAPES[shape]
    assert len(model_shapes(spec, lambda prefix: layout)) == target
    assert len(head_shapes(spec, layout)) == head
