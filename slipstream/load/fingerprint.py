"""A digest of a model: two that differ in it may compute different caches from the same tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from slipstream.errors import LoadError
from slipstream.load.gguf.file import GgufCheckpoint
from slipstream.load.opened import OpenedModel
from slipstream.load.tensor import Checkpoint

PLACE_BYTES = 4096
MAX_PLACES = 4096  # of all files together
END_BYTES = 1 << 20  # at the beginning and the end of a file
WHOLE_BYTES = 64 << 20  # of configuration, tokenizer and template: read as a whole up to here
TEXTS = (".json", ".jinja")  # the files of a folder that say how to read weights and texts


def fingerprint(model: OpenedModel, more: Mapping[str, object]) -> str:
    """``more``: what else the caches depend on, and the model does not know: device, types, layout, versions.

    Configuration, tokenizer, chat template, and the names, shapes and types of all tensors count as a whole. Of the
    weights it takes the size of each file, its first and last megabyte, and up to 4096 places evenly between: in 50 GB
    one every 12 MB. A model that was trained further differs in nearly every byte, a matrix of another size or type
    moves all that follow it: both are seen. What it can miss is a change in place of few bytes, say of one norm's
    weights, that leaves the file as long as it was.

    Where a file lies and what it is called does not matter. Random weights follow from names, shapes and device.
    """
    digest = hashlib.sha256()
    _add(digest, "more", json.dumps(dict(more), sort_keys=True, default=repr))
    _add(digest, "spec", repr(replace(model.spec, name="")))
    for part, checkpoint in (("model", model.checkpoint), ("head", model.head)):
        if checkpoint is None:
            _add(digest, part, "none")
        else:
            _add_tensors(digest, part, checkpoint)
    files = [*model.checkpoint.files(), *(model.head.files() if model.head is not None else ())]
    try:
        _add_weights(digest, files)
        if isinstance(model.checkpoint, GgufCheckpoint):
            _add(digest, "metadata", repr(model.checkpoint.metadata))
        elif files:
            _add_texts(digest, model.path)
    except OSError as error:
        raise LoadError(f"{error.filename} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, value: str | bytes) -> None:
    """Each with its length: two different lists of them are never the same bytes."""
    value = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    digest.update(f"{name} {len(value)} ".encode())
    digest.update(value)


def _add_tensors(digest: hashlib._Hash, part: str, checkpoint: Checkpoint) -> None:
    kind = type(checkpoint).__name__
    described = [(name, checkpoint.dtype(name), _shape(checkpoint, name)) for name in sorted(checkpoint.names())]
    _add(digest, part, json.dumps([kind, described]))


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """Its bytes, where only a runner with loaders of its own knows the type."""
    try:
        return checkpoint.shape(name)
    except LoadError:
        return (checkpoint.num_bytes(name),)


def _add_weights(digest: hashlib._Hash, files: Iterable[Path]) -> None:
    files = list(dict.fromkeys(files))
    sizes = [file.stat().st_size for file in files]
    apart = max(PLACE_BYTES, -(-sum(sizes) // MAX_PLACES))
    for path, size in zip(files, sizes, strict=True):
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            _add(digest, "size", str(size))
            _add(digest, "first", os.pread(file.fileno(), END_BYTES, 0))
            for place in range(END_BYTES, size - END_BYTES, apart):
                _add(digest, "place", os.pread(file.fileno(), PLACE_BYTES, place))
            _add(digest, "last", os.pread(file.fileno(), END_BYTES, max(0, size - END_BYTES)))


def _add_texts(digest: hashlib._Hash, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix in TEXTS and path.is_file():
            with path.open("rb") as file:
                _add(digest, path.name, file.read(WHOLE_BYTES))
            _add(digest, "size", str(path.stat().st_size))
