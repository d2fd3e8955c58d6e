"""Damaged GGUF files, parts and heads of Qwen's models: each opens or is refused in a sentence, with little memory."""

from __future__ import annotations

import math
import random
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import pytest
import tiny_gguf
from gguf import GGUFReader
from tiny_gguf import Options
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError, printable
from slipstream.load import RawTensor, dequantize, open_model

ABSURD = (0, 1, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
COUNT, FEW = 500, 24
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
Files = dict[str, bytes]  # of a model and what lies beside it, by name


def kinds(name: str) -> str:
    return "Q6_K" if "ffn_down" in name else "Q8_0" if "ssm_" in name else "Q4_K"


def next_model() -> PreTrainedModel:
    return tiny_gguf.qwen3_next(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def write_whole(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    tiny_gguf.write(model, folder / "x.gguf", Options(kinds, **options))


def write_beside(folder: Path) -> None:
    model = tiny_gguf.wide(**SMALL)
    tiny_gguf.write(model, folder / "x.gguf", Options(kinds, head=False))
    tiny_gguf.write(model, folder / "mtp-x.gguf", Options(kinds, trunk=False))


WRITERS: dict[str, Callable[[Path], None]] = {
    "dense": lambda folder: write_whole(folder, tiny_gguf.wide(**SMALL)),
    "experts": lambda folder: write_whole(folder, tiny_gguf.wide(moe=True, num_experts=4, **SMALL)),
    "next": lambda folder: write_whole(folder, next_model()),
    "next, as first written": lambda folder: write_whole(folder, next_model(), legacy=True, fused=True),
    "split": lambda folder: write_whole(folder, tiny_gguf.wide(**SMALL), parts=3),
    "head beside": write_beside,
}


@cache
def whole(name: str) -> Files:
    with TemporaryDirectory() as folder:
        WRITERS[name](Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.gguf"))}


@cache
def data_offset(content: bytes) -> int:
    """Where the tensors begin."""
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return int(GGUFReader(file.name).data_offset)


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


def damaged(content: bytes, number: int, chance: random.Random) -> bytes:
    made = bytearray(content)
    DAMAGES[number % len(DAMAGES)](made, data_offset(content), chance)
    return bytes(made)


def write_files(folder: Path, files: Files) -> None:
    for path in folder.glob("*.gguf"):
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read_all(path: Path, head: Path | None = None) -> str:
    """Opens all that a runner would, experts one by one; the error's sentence, or "" where there is none."""
    try:
        opened = open_model(str(path), None if head is None else str(head))
        for checkpoint in (opened.checkpoint, opened.head):
            for name in checkpoint.names() if checkpoint is not None else ():
                raw = checkpoint.get(name)
                assert raw.shape == checkpoint.shape(name)
                assert raw.dtype == checkpoint.dtype(name)
                for matrix in matrices(raw):
                    assert dequantize(matrix).shape == matrix.shape
        assert opened.tokenizer.encode("!!#") is not None
        return opened.head_reason
    except SlipstreamError as error:
        return str(error)


def matrices(raw: RawTensor) -> Iterator[RawTensor]:
    """Those of a stack."""
    if len(raw.shape) < 3:
        yield raw
    else:
        rows = math.prod(raw.shape[1:-1])
        yield from (raw.rows(slice(at, at + rows)) for at in range(0, raw.shape[0] * rows, rows))


def check(folder: Path, name: str, files: Files, model: str, head: str | None = None) -> str:
    """One sentence that names a file, and little memory for what the undamaged files take; the sentence."""
    write_files(folder, files)
    tracemalloc.start()
    said = read_all(folder / model, None if head is None else folder / head)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * sum(map(len, whole(name).values())), said
    if said:
        assert len(said) < 700, said[:700]
        assert len(printable(said).splitlines()) == 1, said
        assert str(folder) in said or said.startswith("no MTP head: "), said
    return said


COUNTS = pytest.mark.parametrize("count", [FEW, pytest.param(COUNT, marks=pytest.mark.exhaustive)])


@COUNTS
@pytest.mark.parametrize("name", ["dense", "experts", "next", "next, as first written"])
def test_a_damaged_file(tmp_path: Path, name: str, count: int) -> None:
    chance = random.Random(count)
    [content] = whole(name).values()
    said = [check(tmp_path, name, {"x.gguf": damaged(content, i, chance)}, "x.gguf") for i in range(count)]
    assert count // 3 < sum(map(bool, said)) < count


@COUNTS
def test_a_damaged_part(tmp_path: Path, count: int) -> None:
    chance = random.Random(count)
    files = whole("split")
    names = list(files)
    refused = 0
    for i in range(count):
        which = chance.choice(names)
        made = files | {which: damaged(files[which], i, chance)}
        refused += bool(check(tmp_path, "split", made, chance.choice(names)))
    assert count // 3 < refused < count


def split_value(content: bytes, key: str, value: int) -> bytes:
    """After the key come the type, 4 bytes, and the value."""
    made = bytearray(content)
    at = made.index(key.encode()) + len(key) + 4
    struct.pack_into("<H" if key != "split.tensors.count" else "<i", made, at, value)
    return bytes(made)


@cache
def parts_amiss() -> dict[str, tuple[Files, str]]:
    """Parts that are whole themselves, and what is said of them."""
    files = whole("split")
    first, second, third = files
    with TemporaryDirectory() as folder:
        write_whole(Path(folder), tiny_gguf.wide(**{**SMALL, "hidden_size": 512}), parts=3)
        others = {path.name: path.read_bytes() for path in Path(folder).glob("*.gguf")}
    return {
        "missing": ({name: files[name] for name in (first, third)}, f"{second} is missing: .* all of them are needed"),
        "twice": (files | {third: files[second]}, f"{third} is not part 3 of 3"),
        "of another model": (files | {second: others[second]}, "needs"),
        "of a whole model": (files | {second: whole("dense")["x.gguf"]}, f"{second} is not part 2 of 3"),
        "another number": (files | {third: split_value(files[third], "split.no", 9)}, f"{third} is not part 3 of 3"),
        "another count": (files | {third: split_value(files[third], "split.count", 4)}, f"{third} is not part 3 of 3"),
        "a count of nothing": (files | {first: split_value(files[first], "split.count", 0)}, "tensor .* is missing"),
        "a count of all others": (
            {name: split_value(content, "split.count", 4) for name, content in files.items()},
            "is one of 4 parts of a split GGUF, but is not called so",
        ),
        "a count of 65535": (files | {first: split_value(files[first], "split.count", 65535)}, "is one of 65535 parts"),
        "fewer tensors": (
            {name: split_value(content, "split.tensors.count", 7) for name, content in files.items()},
            "tensors, they should have 7",
        ),
    }


@pytest.mark.parametrize("fault", parts_amiss())
def test_parts_that_do_not_belong_together(tmp_path: Path, fault: str) -> None:
    files, says = parts_amiss()[fault]
    assert re.search(says, check(tmp_path, "split", files, "x-00001-of-00003.gguf"))


@COUNTS
@pytest.mark.parametrize("given", [False, True])
def test_a_damaged_head_beside_a_model(tmp_path: Path, given: bool, count: int) -> None:
    """It never stops the model that it lies beside; where it was asked for it does."""
    chance = random.Random(count)
    files = whole("head beside")
    refused = 0
    for i in range(count):
        made = files | {"mtp-x.gguf": damaged(files["mtp-x.gguf"], i, chance)}
        said = check(tmp_path, "head beside", made, "x.gguf", "mtp-x.gguf" if given else None)
        assert not said or said.startswith("The MTP head that was given" if given else "no MTP head: "), said
        assert not said or "mtp-x.gguf" in said
        refused += bool(said)
    assert count // 3 < refused < count


@pytest.mark.parametrize("name", WRITERS)
def test_undamaged_files_open(tmp_path: Path, name: str) -> None:
    assert check(tmp_path, name, whole(name), next(each for each in whole(name) if each.startswith("x"))) == ""
