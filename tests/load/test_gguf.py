"""GGUF files: written by the gguf package, read by us; types, names, row order, damage."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import CorruptFile, LoadError, MissingTensor, SlipstreamError
from slipstream.load import open_tokenizer
from slipstream.load.dequantize import dequantize
from slipstream.load.gguf.file import open_gguf
from slipstream.load.gguf.header import TRUNCATED, read_header
from slipstream.load.gguf.rope import llama3_divisors
from slipstream.load.spec import RopeSpec

# name -> largest error relative to the largest weight
WRITABLE = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2, "Q5_1": 5e-2, "Q5_0": 5e-2, "Q4_1": 0.1, "Q4_0": 0.1}
K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="session")
def llama_file(build, tmp_path_factory):
    tensors = build.llama_tensors()
    stored = dict(tensors)
    for part, heads in (("q", 4), ("k", 2)):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        stored[name] = build.interleave(tensors[name], heads)
    return build.gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", stored)


@pytest.mark.parametrize("kind", WRITABLE)
def test_every_plain_and_legacy_type(build, tmp_path, kind):
    tensors = build.llama_tensors()
    checkpoint = open_gguf(build.gguf(tmp_path / "x.gguf", tensors, arch="qwen2", kind=kind))
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, array in tensors.items():
        raw = checkpoint.get(name)
        assert raw.dtype == (kind if array.ndim == 2 else "F32")
        assert raw.shape == checkpoint.shape(name) == array.shape
        assert raw.data.nbytes == checkpoint.num_bytes(name)
        values = dequantize(raw)
        assert values.dtype == np.float32
        assert values.flags.writeable
        np.testing.assert_allclose(values, array, atol=WRITABLE[kind] * np.abs(array).max())


def test_blocks_stay_raw(build, tmp_path):
    checkpoint = open_gguf(build.gguf(tmp_path / "x.gguf", kind="Q4_1"))
    raw = checkpoint.get("model.layers.0.mlp.down_proj.weight")
    assert raw.data.dtype == np.uint8
    assert raw.shape == (64, 96)
    assert raw.data.shape == (64, 96 // 32 * 20)


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_types(build, tmp_path, kind):
    """Rows of 256: the package cannot quantise to these, so the bytes are random, with small scales."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    # [rows, bytes per row]
    data = np.random.default_rng(1).integers(0, 60, (40, block_bytes), dtype=np.uint8)
    tensors = build.llama_tensors(hidden=256, inner=256, kv=128)
    del tensors["model.embed_tokens.weight"]
    sizes = {"qwen2.embedding_length": 256, "qwen2.feed_forward_length": 256}
    path = tmp_path / "x.gguf"
    build.gguf(path, tensors, arch="qwen2", metadata=sizes, raw={"token_embd.weight": (data, kind)})
    raw = open_gguf(path).get("model.embed_tokens.weight")
    assert (raw.dtype, raw.shape) == (kind, (40, 256))
    np.testing.assert_array_equal(raw.data, data)
    reader = gguf.GGUFReader(path)
    theirs = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    np.testing.assert_array_equal(dequantize(raw), gguf.quants.dequantize(theirs.data, theirs.tensor_type))


def test_llama_rows_come_back_half_split(build, llama_file):
    checkpoint = open_gguf(llama_file)
    for name, array in build.llama_tensors().items():
        np.testing.assert_array_equal(checkpoint.get(name).data, array, err_msg=name)


def test_llama_rows_half_split_when_quantised(build, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    array = build.llama_tensors()[name]
    stored = build.llama_tensors() | {name: build.interleave(array, 4)}
    raw = open_gguf(build.gguf(tmp_path / "x.gguf", stored, kind="Q8_0")).get(name)
    np.testing.assert_array_equal(raw.data, gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0))


def biases(build):
    sizes = {"q": 64, "k": 32, "v": 32}
    return {f"model.layers.0.self_attn.{p}_proj.bias": np.arange(n, dtype=np.float32) for p, n in sizes.items()}


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_biases(build, tmp_path, arch):
    """Those of q and k are permuted with their rows in llama files, and in no others."""
    wanted = biases(build)
    stored = dict(wanted)
    if arch == "llama":
        for part, heads in (("q", 4), ("k", 2)):
            name = f"model.layers.0.self_attn.{part}_proj.bias"
            stored[name] = build.interleave(wanted[name], heads)
    checkpoint = open_gguf(build.gguf(tmp_path / "x.gguf", build.llama_tensors() | stored, arch=arch))
    assert checkpoint.spec.qkv_bias
    assert not checkpoint.spec.o_bias
    for name, array in wanted.items():
        np.testing.assert_array_equal(checkpoint.get(name).data, array)


def test_qwen_rows_are_left_alone(build, tmp_path):
    tensors = build.llama_tensors()
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint = open_gguf(build.gguf(tmp_path / "x.gguf", tensors, arch="qwen2"))
    np.testing.assert_array_equal(checkpoint.get(name).data, tensors[name])
    assert checkpoint.spec.architecture == "qwen2"


def test_spec(build, llama_file):
    spec = open_gguf(llama_file).spec
    assert (spec.architecture, spec.hidden_size, spec.num_layers, spec.vocab_size) == ("llama", 64, 1, 40)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.norm_eps, spec.max_context, spec.intermediate_size) == (1e-5, 128, 96)
    assert spec.rope == RopeSpec(theta=10000.0, rotary_dim=16)
    assert spec.tied
    assert spec.eos_token_ids == (0,)


def test_default_model(default_gguf):
    spec = open_gguf(default_gguf).spec
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (576, 30, 9, 3)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.max_context) == (64, 1536, 49152, 8192)
    assert (spec.rope.theta, spec.norm_eps, spec.tied, spec.eos_token_ids) == (100000.0, 1e-5, True, (2,))


def test_qwen3_needs_its_norms(build, tmp_path):
    with pytest.raises(MissingTensor, match="q_norm"):
        open_gguf(build.gguf(tmp_path / "x.gguf", arch="qwen3"))


def test_llama3_frequencies_become_parameters(build, tmp_path):
    rope = RopeSpec(10000.0, 16, llama3_factor=32.0)
    freqs = llama3_divisors(rope).astype(np.float32)
    assert freqs[0] == 1.0
    assert freqs[-1] == pytest.approx(32.0)
    path = build.gguf(tmp_path / "x.gguf", raw={"rope_freqs.weight": (freqs, "F32")})
    found = open_gguf(path).spec.rope
    assert found.llama3_factor == pytest.approx(32.0)
    assert found.llama3_original_context == 8192


def test_llama3_divisors_are_those_of_transformers():
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(np.arange(0, 128, 2) / 128)
    ours = plain / llama3_divisors(RopeSpec(5e5, 128, llama3_factor=8.0))
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5)


def test_broken_metadata(build, tmp_path):
    with pytest.raises(LoadError, match="'block_count'"):
        open_gguf(build.gguf(tmp_path / "a.gguf", metadata={"llama.block_count": None}))
    with pytest.raises(CorruptFile, match="at most"):
        open_gguf(build.gguf(tmp_path / "b.gguf", metadata={"llama.block_count": 2**31}))
    with pytest.raises(MissingTensor, match=r"layers\.1\."):
        open_gguf(build.gguf(tmp_path / "c.gguf", metadata={"llama.block_count": 2}))
    with pytest.raises(CorruptFile, match="do not fit"):
        open_gguf(build.gguf(tmp_path / "d.gguf", metadata={"llama.attention.head_count_kv": 3}))


def test_missing_tensor_names_the_file(llama_file):
    with pytest.raises(MissingTensor, match=r"tiny\.gguf has no tensor 'lm_head\.weight'"):
        open_gguf(llama_file).get("lm_head.weight")


def test_not_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    for content, says in (
        (b"", r"is empty: fetch it again\."),
        (b"GG", "'GGUF'"),
        (b"PK\3\4" + bytes(100), "'GGUF'"),
        (b"GGUF", rf"ends after 4 bytes, inside its header, {TRUNCATED}\."),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match=says):
            open_gguf(path)
    with pytest.raises(LoadError, match="not a file"):
        open_gguf(tmp_path)


def test_where_a_tensor_cannot_lie(tmp_path):
    """Behind the end, as while a file is being fetched, or where no converter puts one: another fault, said as such."""
    whole, path = tensor_header(offset=0) + bytes(128), tmp_path / "x.gguf"
    path.write_bytes(whole)
    [tensor] = read_header(path).tensors.values()
    end = tensor.place.stop
    path.write_bytes(whole[: end - 1])
    with pytest.raises(CorruptFile, match=rf"has {end - 1} bytes, tensor 't' needs up to byte {end}, {TRUNCATED}\.$"):
        read_header(path)
    path.write_bytes(tensor_header(offset=4) + bytes(128))
    with pytest.raises(CorruptFile, match=r"tensor 't' starts at byte \d+, no multiple of 8: it is damaged\.$"):
        read_header(path)


def tensor_header(offset):
    """Of a file with four floats."""
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, offset)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [0, 8, 9, 99])
def test_absurd_lengths_end_at_once(tmp_path, kind):
    """An array that claims 2**60 elements."""
    key = struct.pack("<Q", 1) + b"k"
    body = b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + key + struct.pack("<IIQ", 9, kind, 2**60)
    (tmp_path / "x.gguf").write_bytes(body + bytes(64))
    with pytest.raises(CorruptFile):
        read_header(tmp_path / "x.gguf")


def test_the_same_name_twice(tmp_path):
    def header(num_tensors, num_values, body):
        return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + body

    value = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(header(0, 2, value * 2) + bytes(64))
    with pytest.raises(CorruptFile, match="key 'k' twice"):
        read_header(path)
    path.write_bytes(header(2, 0, tensor * 2) + bytes(64))
    with pytest.raises(CorruptFile, match="tensor 't' twice"):
        read_header(path)
    path.write_bytes(header(1, 1, value + tensor) + bytes(64))
    assert read_header(path).metadata == {"k": 7}


def check_damaged(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(content)
        try:
            checkpoint = open_gguf(path)
            for name in checkpoint.names():
                assert checkpoint.get(name).data.nbytes == checkpoint.num_bytes(name)
            open_tokenizer(path, checkpoint.spec.eos_token_ids).encode("hello")
        except SlipstreamError:
            return


@settings(max_examples=200, deadline=None)
@given(part=st.floats(0, 1, exclude_max=True))
def test_truncation_is_always_said(llama_file, part):
    content = llama_file.read_bytes()
    cut = content[: int(part * (len(content) - 64))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(cut)
        with pytest.raises(CorruptFile, match=r"x\.gguf"):
            open_gguf(path)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 2200), noise=st.binary(min_size=1, max_size=9))
def test_damage_never_surprises(llama_file, at, noise):
    content = bytearray(llama_file.read_bytes())
    content[at : at + len(noise)] = noise
    check_damaged(bytes(content))
