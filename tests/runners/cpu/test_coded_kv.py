"""Keys and values in FP8: the codes are the reference's; attention over them has the bits of attention over floats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from attention_case import make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.runners.cpu.bindings import Kernels
from slipstream.runners.torch.caches import FP8, LayerKv, coded_layer, decode, encode, kv_bytes

EXAMPLES = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def empty_layer(num_blocks: int, heads: int, block_size: int, dim: int) -> LayerKv:
    """Codes that are no number."""
    num_bytes = kv_bytes(heads * block_size, dim, FP8)
    return coded_layer(torch.full((2, num_blocks, num_bytes), 0x7F, dtype=torch.uint8), (heads, block_size, dim))


def spread(*shape: int) -> torch.Tensor:
    """Rows of very different size, with outliers, exact zeros and halves between two codes."""
    values = torch.randn(*shape) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1)))
    values *= torch.where(torch.rand(shape) < 0.05, 100.0, 1.0)
    values[torch.rand(shape) < 0.1] = 0.0
    ties = torch.randint(-127, 128, shape).div(8.0) * values.abs().amax(-1, keepdim=True).log2().floor().exp2() / 128
    return torch.where(torch.rand(shape) < 0.2, ties, values)


@dataclass
class Stored:
    floats: LayerKv
    codes: LayerKv
    blocks: torch.Tensor  # [tokens]
    at: torch.Tensor


def store(kernels: Kernels, qkv: torch.Tensor, heads: int, kv_heads: int, dim: int, norm: bool) -> Stored:
    """The same tokens into a cache of floats and one of codes."""
    num_tokens, block_size = qkv.shape[0], 8
    num_blocks = -(-num_tokens // block_size) + 1
    floats = LayerKv(*torch.zeros(2, num_blocks, kv_heads, block_size, dim))
    codes = empty_layer(num_blocks, kv_heads, block_size, dim)
    table = torch.randperm(num_blocks, dtype=torch.int32)[None]
    positions, slots = torch.arange(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int32)
    tables = torch.rand(2, num_tokens, dim // 4).unbind()
    norms = (torch.rand(dim), torch.rand(dim), 1e-5) if norm else ()
    queries = []
    for kv in (floats, codes):
        q = torch.empty(num_tokens, heads * dim)
        kernels.rope_store(qkv, q, kv.k, kv.v, positions, positions, slots, table, *tables, *norms)
        queries.append(q)
    assert torch.equal(*queries)
    return Stored(floats, codes, table[0][positions // block_size].long(), positions.long() % block_size)


@pytest.mark.parametrize("dim", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("norm", [False, True])
def test_the_codes_are_the_references(any_kernels: Kernels, dim: int, norm: bool) -> None:
    stored = store(any_kernels, spread(60, 7, dim).flatten(1), 3, 2, dim, norm)
    place = stored.blocks, slice(None), stored.at
    for floats, codes, scales in (
        (stored.floats.k, stored.codes.k, stored.codes.k_scale),
        (stored.floats.v, stored.codes.v, stored.codes.v_scale),
    ):
        wanted_codes, wanted_scales = encode(floats[place])
        assert scales is not None
        assert torch.equal(scales[place], wanted_scales)
        assert torch.equal(codes[place], wanted_codes)
    assert stored.codes.k_scale is not None
    assert len(stored.codes.k_scale[place].unique()) > 20


@EXAMPLES
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 12)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 5, 16]),
    threads=st.integers(1, 3),
)
def test_the_bits_are_those_of_the_decoded_numbers(
    any_kernels: Kernels,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    threads: int,
) -> None:
    """Decoding rows, drafted rows and pieces of prompts, contexts in one piece or split over threads."""
    any_kernels.set_threads(threads)
    case = make(rows, kv_heads * group, kv_heads, dim, block_size)
    sizes = torch.exp2(torch.randint(-8, 9, (*case.caches.shape[:-1], 1)))  # scales that differ
    coded = empty_layer(case.caches.shape[1], kv_heads, block_size, dim)
    assert coded.k_scale is not None
    assert coded.v_scale is not None
    written = ~case.caches.isnan()
    for values, codes, scales in zip(case.caches * sizes, (coded.k, coded.v), (coded.k_scale, coded.v_scale)):
        own_codes, own_scales = encode(values.nan_to_num())
        codes.copy_(own_codes), scales.copy_(own_scales)
        codes[values.isnan()] = 0x7F  # not a number, where nothing was written
    decoded = torch.stack([decode(coded.k, coded.k_scale), decode(coded.v, coded.v_scale)])
    case = replace(case, caches=torch.where(written, decoded, torch.nan))
    index = case.positions, case.slot, case.table
    got = any_kernels.attend(case.q, coded.k, coded.v, *index, 0.3, torch.full_like(case.q, torch.nan))
    assert torch.equal(got, case.attend(any_kernels))
    for at in range(0, len(got), 3):  # and each alone
        some = slice(at, at + 1)
        alone = [x[some].contiguous() for x in (case.q, case.positions, case.slot)]
        one = any_kernels.attend(alone[0], coded.k, coded.v, *alone[1:], case.table, 0.3, torch.empty_like(alone[0]))
        assert torch.equal(one, got[some])


def test_every_code(any_kernels: Kernels) -> None:
    """One position: what comes out is its value."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(FP8).float().isfinite()].repeat(2)[:256].view(1, 1, 1, 256)
    for scale in (2.0**-100, 0.03125, 1.0, 1.9921875, 2.0**100):
        layer = empty_layer(1, 1, 1, 256)
        assert layer.k_scale is not None
        assert layer.v_scale is not None
        layer.k.zero_(), layer.k_scale.fill_(1), layer.v.copy_(codes), layer.v_scale.fill_(scale)
        zero = torch.zeros(1, dtype=torch.int32)
        got = any_kernels.attend(torch.ones(1, 256), layer.k, layer.v, zero, zero, zero[None], 1.0, torch.empty(1, 256))
        assert torch.equal(got.flatten(), decode(layer.v, layer.v_scale).flatten())
