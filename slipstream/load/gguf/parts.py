"""The header of a GGUF file, or of all parts of a split one: `name-00001-of-00003.gguf` and those beside it."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import CorruptFile, LoadError
from slipstream.load.fields import Fields
from slipstream.load.gguf.header import GgufHeader, GgufTensor, read_header
from slipstream.load.gguf_names import PART

MAX_PARTS = 9999


def read_parts(path: Path) -> GgufHeader:
    """Any part may be given. The metadata is the first one's."""
    header = read_header(path)
    count = Fields(header.metadata, str(path)).count("split.count", 0)
    if count <= 1:
        return header
    paths = _beside(path, count)
    parts = [header if each == path else read_header(each) for each in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        fields = Fields(part.metadata, str(part.path))
        if fields.count("split.no", 0) != number or fields.count("split.count", 0) != count:
            raise CorruptFile(
                f"{part.path} is not part {number + 1} of {count} of the model: another file by its name."
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise CorruptFile(f"{part.path} has the tensor {min(twice)!r}, which an earlier part has too.")
        tensors |= part.tensors
    first = parts[0]
    wanted = Fields(first.metadata, str(first.path)).count("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CorruptFile(f"{first.path} and its other parts have {len(tensors)} tensors, they should have {wanted}.")
    return GgufHeader(first.path, first.metadata, tensors, tuple(file for part in parts for file in part.files))


def _beside(path: Path, count: int) -> list[Path]:
    match = PART.fullmatch(path.stem) if path.suffix == ".gguf" else None
    if match is None or int(match["count"]) != count or count > MAX_PARTS:
        raise LoadError(
            f"{path} is one of {count} parts of a split GGUF, but is not called so: the parts are found by names like "
            f"model-00001-of-{count:05}.gguf."
        )
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for each in paths:
        if not each.is_file():
            raise LoadError(f"{each} is missing: {path.name} is one of {count} parts, and all of them are needed.")
    return paths
