"""Faults of a tokenizer file as the `tokenizers` library reports them, turned into errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.errors import SlipstreamError

PANIC = "PanicException"  # of the library's Rust code; no Exception, and no module exports it


@contextmanager
def library_faults(kind: type[SlipstreamError], what: str) -> Iterator[None]:
    """The library raises the bare Exception, or panics, for faults of a file; anything else is not ours to explain."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != PANIC:
            raise
        first_line = str(error).partition("\n")[0]
        raise kind(f"{what}: {first_line}.") from error
