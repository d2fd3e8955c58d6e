"""Memory for packed weights: zeros, apart from each other, given back when nobody has them any more."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise

import pytest

from slipstream.host import resident_bytes
from slipstream.runners.cpu.pages import ALONE, HUGE, LEAST, LINE, SHARED, Pages

SIZES = (1, LEAST - 1, LEAST, LEAST + 1, HUGE, HUGE + 1, ALONE - 1, ALONE, SHARED + 3)


def test_zeros_that_do_not_overlap() -> None:
    pages = Pages()
    parts = [pages.zeros(size) for size in SIZES * 3]
    for part in parts:
        assert not part.any()
        assert part.data_ptr() % LINE == 0
        part.fill_(1)
    assert [part.numel() for part in parts] == [*SIZES * 3]
    assert all(int(part.sum()) == part.numel() for part in parts)
    places = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in parts)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


def test_many_small_ones_go_on_in_the_next_mapping() -> None:
    pages = Pages()
    parts = [pages.zeros(ALONE - 1).fill_(at + 1) for at in range(9)]
    assert [int(part.max()) for part in parts] == [int(part.min()) for part in parts] == [*range(1, 10)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory goes back to the system at once on Linux only")
def test_memory_goes_back() -> None:
    pages, before = Pages(), resident_bytes()
    parts = [pages.zeros(size).fill_(1) for size in (8 << 20, 8 << 20, 200 << 20)]
    assert resident_bytes() - before > 200 << 20
    del parts
    gc.collect()
    assert resident_bytes() - before < 32 << 20
    assert not pages.zeros(8 << 20).any()
