"""Damaged GGUF files of Qwen3.5 models: each opens or is refused in one sentence, with little memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_gguf
from gguf import GGUFReader
from tiny_gguf import Options

from slipstream.errors import SlipstreamError, printable
from slipstream.load import dequantize, open_model

ABSURD = (0, 1, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
COUNT, FEW = 500, 60


def kinds(name: str) -> str:
    return "Q6_K" if "ffn_down" in name else "Q8_0" if "ssm_" in name else "Q4_K"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, int]]:
    """Contents and where the tensors begin: dense and experts, with heads."""
    folder = tmp_path_factory.mktemp("whole")
    small = {"num_hidden_layers": 2, "full_attention_interval": 2}
    paths = [
        tiny_gguf.write(tiny_gguf.wide(**small), folder / "dense.gguf", Options(kinds)).path,
        tiny_gguf.write(tiny_gguf.wide(moe=True, num_experts=4, **small), folder / "moe.gguf", Options(kinds)).path,
    ]
    return [(path.read_bytes(), int(GGUFReader(path).data_offset)) for path in paths]


def cut(content: bytearray, header: int, chance: random.Random) -> None:
    del content[chance.choice([chance.randrange(header), chance.randrange(len(content))]) :]


def noise(content: bytearray, header: int, chance: random.Random) -> None:
    at = chance.randrange(header)
    length = chance.randint(1, 12)
    content[at : at + length] = chance.randbytes(len(content[at : at + length]))


def absurd_number(content: bytearray, header: int, chance: random.Random) -> None:
    """In the place of a size, a count, a dimension or an offset."""
    form = chance.choice(["<I", "<Q"])
    at = chance.randrange(8, header - 8)
    struct.pack_into(form, content, at, chance.choice(ABSURD))


def metadata_value(content: bytearray, header: int, chance: random.Random) -> None:
    """A number of the architecture: after its key come the type, 4 bytes, and the value."""
    keys = [
        b"block_count",
        b"head_count",
        b"head_count_kv",
        b"key_length",
        b"state_size",
        b"group_count",
        b"inner_size",
    ]
    keys += [b"time_step_rank", b"conv_kernel", b"nextn_predict_layers", b"full_attention_interval", b"expert_count"]
    at = content.find(key := chance.choice(keys), 0, header)
    if at >= 0:
        struct.pack_into("<I", content, at + len(key) + 4, chance.choice([*ABSURD, 2, 4, 64, 1000, 4000]))


def swapped(content: bytearray, header: int, chance: random.Random) -> None:
    """Two stretches of the header change places."""
    first, second = (chance.randrange(header - 64) for _ in range(2))
    length = chance.randint(1, 64)
    content[first : first + length], content[second : second + length] = (
        content[second : second + length],
        content[first : first + length],
    )


def garbage_weights(content: bytearray, header: int, chance: random.Random) -> None:
    at = chance.randrange(header, len(content) - 5000)
    content[at : at + 5000] = chance.randbytes(5000)


DAMAGES: list[Callable[[bytearray, int, random.Random], None]]
DAMAGES = [cut, noise, absurd_number, metadata_value, swapped, garbage_weights]


def read_all(path: Path) -> str:
    """Opens all that a runner would; the error's sentence, or "" where there is none."""
    try:
        opened = open_model(str(path))
        for checkpoint in (opened.checkpoint, opened.head):
            for name in checkpoint.names() if checkpoint is not None else ():
                raw = checkpoint.get(name)
                assert raw.shape == checkpoint.shape(name)
                assert raw.dtype == checkpoint.dtype(name)
                if len(raw.shape) < 3:
                    assert dequantize(raw).shape == raw.shape
        assert opened.tokenizer.encode("!!#") is not None
        return opened.head_reason
    except SlipstreamError as error:
        return str(error)


@pytest.mark.parametrize("count", [FEW, pytest.param(COUNT, marks=pytest.mark.exhaustive)])
def test_each_is_one_sentence_in_little_memory(tmp_path: Path, files: list[tuple[bytes, int]], count: int) -> None:
    chance = random.Random(count)
    path = tmp_path / "x.gguf"
    refused = 0
    for i in range(count):
        whole, header = files[i % 2]
        content = bytearray(whole)
        DAMAGES[i // 2 % len(DAMAGES)](content, header, chance)
        path.write_bytes(content)
        tracemalloc.start()
        said = read_all(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 * len(whole), (i, said)
        if said:
            refused += 1
            assert len(said) < 700, said[:700]
            assert len(printable(said).splitlines()) == 1, said
            assert "x.gguf" in said or said.startswith("no MTP head: "), said
    assert count // 3 < refused < count


def test_undamaged_files_open(tmp_path: Path, files: list[tuple[bytes, int]]) -> None:
    for whole, _ in files:
        (tmp_path / "x.gguf").write_bytes(whole)
        assert read_all(tmp_path / "x.gguf") == ""
