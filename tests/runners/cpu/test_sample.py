"""Greedy and Gumbel choices against the same in torch."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.runners.cpu.bindings import Kernels

EXAMPLES = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LOW32 = 0xFFFFFFFF
LOW64 = (1 << 64) - 1


def splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & LOW64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & LOW64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & LOW64
    return z ^ z >> 31


def gumbel(seed: int, position: int, vocab: int) -> torch.Tensor:
    """The noise as it is specified, in int64 and float64."""
    key = splitmix64((seed & LOW64) ^ (position * 0x9E3779B97F4A7C15 & LOW64))
    low, high = key & LOW32, key >> 32
    x = (torch.arange(vocab) * 0x9E3779B1 + low) & LOW32
    x = x ^ x >> 16
    x = (x * 0x85EBCA6B) & LOW32
    x = x ^ x >> 13 ^ high
    x = (x * 0xC2B2AE35) & LOW32
    x = x ^ x >> 16
    return -torch.log(-torch.log(((x >> 9) + 0.5).double() * 2.0**-23))


@EXAMPLES
@given(rows=st.integers(1, 9), vocab=st.sampled_from([1, 5, 16, 1000, 8192, 8193, 20001]), ties=st.booleans())
def test_argmax(any_kernels: Kernels, rows: int, vocab: int, ties: bool) -> None:
    logits = torch.randint(0, 4, (rows, vocab)).float() if ties else torch.randn(rows, vocab) * 5
    conf = torch.empty(rows)
    ids = any_kernels.argmax(logits, conf)
    assert ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert torch.allclose(conf.double(), logits.double().softmax(1).amax(1), rtol=1e-5)
    assert torch.equal(any_kernels.argmax(logits), ids)


def test_argmax_of_forbidden_tokens(any_kernels: Kernels) -> None:
    logits = torch.full((2, 20000), -torch.inf)
    logits[0, 12345], logits[1, 3] = -7.0, 2.0
    conf = torch.empty(2)
    assert any_kernels.argmax(logits, conf).tolist() == [12345, 3]
    assert torch.allclose(conf, torch.ones(2))


@EXAMPLES
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 7, 300, 9000]),
    rows=st.integers(1, 5),
    inv_temperature=st.floats(0.1, 10),
)
def test_gumbel_argmax(
    any_kernels: Kernels, seed: int, position: int, vocab: int, rows: int, inv_temperature: float
) -> None:
    logits = torch.randn(rows, vocab)
    positions = position + torch.arange(rows)
    inv = torch.full((rows,), inv_temperature)
    got = any_kernels.gumbel_argmax(logits, inv, torch.full((rows,), seed), positions)
    noisy = logits.double() * inv.double()[:, None] + torch.stack([gumbel(seed, p, vocab) for p in positions.tolist()])
    chosen = noisy.gather(1, got[:, None])[:, 0]
    assert (noisy.amax(1) - chosen <= 1e-5).all()  # the best, or equal up to rounding


def test_gumbel_noise_is_accurate_at_both_ends(any_kernels: Kernels) -> None:
    """Give one id a logit that beats (or loses to) another's noise by a hair: the choice shows the noise."""
    noise = gumbel(1, 2, 50000)
    seeds, positions, inv = torch.tensor([1]), torch.tensor([2]), torch.ones(1)
    for other in (int(noise.argmax()), int(noise.argmin()), int(noise.abs().argmin())):
        for side in (-1, 1):
            logits = torch.full((1, 50000), -1e4)
            logits[0, 7], logits[0, other] = noise[other] - noise[7] + side * 2e-5 * (1 + noise[other].abs()), 0.0
            got = any_kernels.gumbel_argmax(logits, inv, seeds, positions)
            assert got.item() == (7 if side > 0 else other)


def test_gumbel_draws_follow_the_softmax(kernels: Kernels) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    n = 20000
    samples = kernels.gumbel_argmax(
        logits.expand(n, 4).contiguous(), torch.ones(n), torch.full((n,), 9), torch.arange(n)
    )
    share = torch.bincount(samples, minlength=4) / n
    assert torch.allclose(share, logits.softmax(1)[0], atol=0.015)
