"""Attention over random block tables against a dense softmax, and bit for bit against itself."""

from __future__ import annotations

import torch
from attention_case import Case, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.runners.cpu.bindings import Kernels

EXAMPLES = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reference(case: Case, heads: int, kv_heads: int, dim: int) -> torch.Tensor:
    out = []
    for q, pos, slot in zip(case.q.double().reshape(-1, heads, dim), case.positions, case.slot):
        k, v = case.dense[:, slot, : pos + 1].double().repeat_interleave(heads // kv_heads, 2)  # [context, heads, D]
        weights = torch.softmax(torch.einsum("hd,chd->hc", q, k) * 0.3, -1)
        out.append(torch.einsum("hc,chd->hd", weights, v).reshape(-1))
    return torch.stack(out).float()


@EXAMPLES
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 12)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([5, 16, 32]),
    data=st.data(),
)
def test_against_dense_softmax(
    any_kernels: Kernels,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    data: st.DataObject,
) -> None:
    case = make(rows, kv_heads * group, kv_heads, dim, block_size)
    got = case.attend(any_kernels)
    assert torch.allclose(got, reference(case, kv_heads * group, kv_heads, dim), rtol=1e-4, atol=5e-5)
    at = data.draw(st.integers(0, len(got) - 1))
    assert torch.equal(case.attend(any_kernels, slice(at, at + 1)), got[at : at + 1])


def test_same_bits_alone_in_company_and_on_any_thread_count(any_kernels: Kernels) -> None:
    case = make([(0, 41), (500, 7), (127, 3), (128, 1), (900, 1)], 9, 3, 64, 16)
    whole = case.attend(any_kernels)
    for threads in (1, 3, 2):
        any_kernels.set_threads(threads)
        assert torch.equal(case.attend(any_kernels), whole)
        alone = [case.attend(any_kernels, slice(i, i + 1)) for i in range(len(whole))]
        assert torch.equal(torch.cat(alone), whole)
        pairs = [case.attend(any_kernels, slice(i, i + 2)) for i in range(0, len(whole), 2)]
        assert torch.equal(torch.cat(pairs), whole)


def test_large_scores_do_not_overflow(any_kernels: Kernels) -> None:
    case = make([(200, 2)], 2, 1, 32, 16)
    case.q *= 1000
    got = case.attend(any_kernels)
    assert torch.allclose(got, reference(case, 2, 1, 32), rtol=1e-3, atol=1e-3)
