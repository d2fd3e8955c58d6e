"""Our safetensors reader against the reference writer, and against files that are not what they claim."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from slipstream.errors import CorruptFile, LoadError, MissingTensor, SlipstreamError, UnknownModel
from slipstream.load.dequantize import dequantize
from slipstream.load.hf.safetensors import SafetensorsFile, open_folder


def test_reads_what_the_reference_library_wrote(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((4,), np.float16), "c": np.float32([[]])}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert sorted(file) == ["a", "b", "c"]
    for name, array in arrays.items():
        raw = file.get(name)
        assert raw.shape == array.shape
        assert raw.dtype == {"float32": "F32", "float16": "F16"}[array.dtype.name]
        np.testing.assert_array_equal(raw.data, array)


@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_bf16_at_any_alignment(tmp_path, build, pad):
    values = np.float32([1.0, -2.5, 3e38, 0.0])
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "x.safetensors"
    path.write_bytes(build.safetensors_bytes({"w": ("BF16", bits)}, pad=pad))
    raw = SafetensorsFile(path).get("w")
    assert raw.data.dtype == np.uint16
    assert raw.data.flags.aligned
    np.testing.assert_allclose(dequantize(raw), values, rtol=1 / 128)


def test_unknown_type_only_matters_when_asked_for(tmp_path, build):
    path = tmp_path / "x.safetensors"
    path.write_bytes(build.safetensors_bytes({"n": ("I64", np.arange(3)), "w": ("F32", np.float32([5]))}))
    file = SafetensorsFile(path)
    assert file.get("w").data[0] == 5
    with pytest.raises(UnknownModel, match="'n' is stored as I64"):
        file.get("n")
    with pytest.raises(MissingTensor, match="'absent'"):
        file.get("absent")


def test_every_truncation_is_corrupt(tmp_path, build):
    whole = build.safetensors_bytes({"a": ("F32", np.ones((2, 3), np.float32)), "b": ("F16", np.ones(4, np.float16))})
    path = tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match=r"x\.safetensors"):
            SafetensorsFile(path)
    path.write_bytes(whole)
    assert len(list(SafetensorsFile(path))) == 2


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 130), value=st.integers(0, 255), count=st.integers(1, 3))
def test_a_damaged_header_never_surprises(build, at, value, count):
    whole = bytearray(
        build.safetensors_bytes({"a": ("F32", np.ones((2, 3), np.float32)), "b": ("F16", np.ones(4, np.float16))})
    )
    whole[at : at + count] = bytes([value]) * count
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(bytes(whole))
        try:
            file = SafetensorsFile(path)
            for name in file:
                assert file.get(name).data.nbytes <= len(whole)
        except SlipstreamError:
            pass


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": 1, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
)
def test_impossible_entries(tmp_path, build, entry):
    path = tmp_path / "x.safetensors"
    path.write_bytes(build.safetensors_bytes({}, bad=entry) + bytes(8))
    with pytest.raises(CorruptFile, match="'bad'"):
        SafetensorsFile(path)


@pytest.fixture
def sharded(tmp_path, build):
    for shard, value in (("one", 1), ("two", 2)):
        packed = build.safetensors_bytes({f"w{value}": ("F32", np.float32([value]))})
        (tmp_path / f"{shard}.safetensors").write_bytes(packed)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w1": "one.safetensors", "w2": "two.safetensors"}}))
    return index


def test_shards_are_one_store(sharded):
    store = open_folder(sharded.parent)
    assert sorted(store) == ["w1", "w2"]
    assert [store.get(name).data[0] for name in ("w1", "w2")] == [1, 2]
    with pytest.raises(MissingTensor):
        store.get("w3")


def test_missing_shard(sharded):
    (sharded.parent / "two.safetensors").unlink()
    with pytest.raises(LoadError, match=r"two\.safetensors, which is missing"):
        open_folder(sharded.parent)


def test_tensor_in_two_shards(sharded, build):
    both = {name: ("F32", np.float32([0])) for name in ("w1", "w2")}
    (sharded.parent / "two.safetensors").write_bytes(build.safetensors_bytes(both))
    with pytest.raises(CorruptFile, match="'w1'"):
        open_folder(sharded.parent)


def test_tensor_in_two_shards_and_not_in_the_index(sharded, build):
    for shard, name in (("one", "w1"), ("two", "w2")):
        tensors = {key: ("F32", np.float32([0])) for key in (name, "stray")}
        (sharded.parent / f"{shard}.safetensors").write_bytes(build.safetensors_bytes(tensors))
    with pytest.raises(CorruptFile, match="'stray'"):
        open_folder(sharded.parent)


def test_shard_without_its_tensor(sharded, build):
    (sharded.parent / "two.safetensors").write_bytes(build.safetensors_bytes({"other": ("F32", np.float32([0]))}))
    with pytest.raises(CorruptFile, match="'w2'"):
        open_folder(sharded.parent)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"weight_map": {"w": "../x.safetensors"}}', '{"weight_map": {"w": 3}}']
)
def test_bad_index(sharded, text):
    sharded.write_text(text)
    with pytest.raises(CorruptFile, match="index"):
        open_folder(sharded.parent)


def test_folder_without_index_or_weights(sharded, tmp_path):
    sharded.unlink()
    with pytest.raises(LoadError, match="2 safetensors files"):
        open_folder(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    assert list(open_folder(tmp_path)) == ["w1"]
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(LoadError, match="no safetensors weights"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["model_mtp.safetensors", "mtp.safetensors", "model_extra_tensors.safetensors"])
def test_heads_in_files_that_the_index_does_not_name(sharded, build, name):
    """Of a tensor that both have, the index's is taken."""
    more = {"mtp.fc.weight": ("F32", np.float32([3])), "w1": ("F32", np.float32([9]))}
    (sharded.parent / name).write_bytes(build.safetensors_bytes(more))
    (sharded.parent / "other.safetensors").write_bytes(b"not looked at")
    store = open_folder(sharded.parent)
    assert sorted(store) == ["mtp.fc.weight", "w1", "w2"]
    assert [store.get(each).data[0] for each in ("mtp.fc.weight", "w1")] == [3, 1]
    assert {file.path.name for file in store.mapped_files()} == {"one.safetensors", "two.safetensors", name}


def test_a_head_beside_a_single_file(tmp_path, build):
    for file, name in (("model.safetensors", "w"), ("mtp.safetensors", "mtp.fc.weight")):
        (tmp_path / file).write_bytes(build.safetensors_bytes({name: ("F32", np.float32([1]))}))
    assert sorted(open_folder(tmp_path)) == ["mtp.fc.weight", "w"]
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert sorted(open_folder(tmp_path)) == ["mtp.fc.weight", "w"]
