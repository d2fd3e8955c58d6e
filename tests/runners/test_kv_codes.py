"""Keys and values in FP8: what a code says, what rounding costs, and what it does to the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from harness import open_runner, target_logits

from slipstream.load.random.model import open_random
from slipstream.runners.torch.caches import FP8, LEAST_SCALE, LayerKv, PagedKv, decode, encode
from slipstream.runners.torch.loading import TorchRunner

Rounding = Callable[[torch.Tensor], torch.Tensor]


def coded(values: torch.Tensor) -> torch.Tensor:
    return decode(*encode(values))


def without_scales(values: torch.Tensor) -> torch.Tensor:
    return values.to(FP8).float()


def in_e5m2(values: torch.Tensor) -> torch.Tensor:
    scale = encode(values)[1].float()[..., None]
    return (values / scale).to(torch.float8_e5m2).float() * scale


def distance(values: torch.Tensor, rounding: Rounding) -> float:
    return float((rounding(values) - values).norm() / values.norm())


def numbers(name: str) -> torch.Tensor:
    """[rows, dim]"""
    values = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    if name == "peaked":  # a few channels far larger than the others, as keys have them
        values[:, ::50] *= 50
    return values * {"small": 2.0**-10, "large": 500.0}.get(name, 1.0)


@pytest.mark.parametrize("name", ["random", "peaked", "small", "large"])
def test_the_distance_is_that_of_four_bits(name: str) -> None:
    values = numbers(name)
    assert distance(values, coded) < 0.028
    assert distance(values, in_e5m2) > 0.028
    if name in ("small", "large"):
        assert distance(values, without_scales) > 0.2


def test_the_largest_is_nearly_exact() -> None:
    values = numbers("peaked")
    largest = values.abs().amax(-1)
    assert ((coded(values).abs().amax(-1) - largest).abs() <= largest * 2**-8).all()


def test_extremes() -> None:
    rows = torch.stack([torch.zeros(16), torch.full((16,), 1e-44), torch.full((16,), 3e38), -torch.ones(16)])
    codes, scales = encode(rows)
    assert scales[0] == LEAST_SCALE
    assert not codes[0].any()
    assert coded(rows).isfinite().all()
    assert torch.equal(coded(rows)[3], rows[3])
    mixed = torch.tensor([[1e30, 1.0, -1e30, 1e-30]])
    assert torch.equal(coded(mixed)[0, [1, 3]], torch.zeros(2)), "next to a giant nothing is left of them"
    assert coded(torch.tensor([[1.0, float("nan")]])).isnan().any(), "a fault stays visible"


def test_coding_twice_changes_nothing() -> None:
    values = coded(numbers("random"))
    assert torch.equal(coded(values), values)


def test_a_token_has_its_codes_alone_and_in_company() -> None:
    values = numbers("peaked")
    codes, scales = encode(values)
    for i in range(0, len(values), 100):
        alone = encode(values[i : i + 1])
        assert torch.equal(alone[0][0], codes[i])
        assert torch.equal(alone[1][0], scales[i])


def test_layers_write_and_read_what_they_were_given() -> None:
    spec = replace(open_random("tiny").spec, num_kv_heads=2, head_dim=16)
    kv = PagedKv(spec, 3, 5, 4, torch.device("cpu"), FP8)
    k, v = torch.randn(2, 6, 2, 16)
    blocks, at = torch.tensor([4, 4, 0, 0, 2, 2]), torch.tensor([0, 3, 1, 2, 0, 1])
    kv.layers[1].write(blocks, at, k, v)
    for values, read in zip((k, v), kv.layers[1].read(torch.arange(5), torch.float32), strict=True):
        assert torch.equal(read[blocks, :, at], coded(values))
    for other in (0, 2):
        assert not kv.buffer[other].any()
    kv.copy(4, 3)
    copied = kv.layers[1].read(torch.tensor([3, 4]), torch.float32)
    assert all(torch.equal(part[0], part[1]) for part in copied)


def next_tokens(
    runner: TorchRunner, tokens: list[int], rounding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Logits with keys and values rounded as they are written."""
    write = LayerKv.write

    def rounded(self: LayerKv, block: torch.Tensor, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        write(self, block, at, rounding(k), rounding(v))

    with monkeypatch.context() as patched:
        patched.setattr(LayerKv, "write", rounded)
        return target_logits(runner, tokens, [len(tokens)])


def divergence(wanted: torch.Tensor, found: torch.Tensor, sharpness: float) -> float:
    """KL, mean of all positions."""
    p, q = ((logits.double() * sharpness).log_softmax(-1) for logits in (wanted, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("sharpness", [1.0, 10.0], ids=["random", "peaked"])
@pytest.mark.parametrize(("kind", "most"), [("llama-gqa-tied", 5e-3), ("qwen2", 2e-3), ("qwen3_5", 2e-5)])
def test_next_tokens(kind: str, most: float, sharpness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between bfloat16 and e5m2; the runner's own caches are the rounding that was measured."""
    folder = tiny.save(tiny.build(kind), tmp_path)
    runner, own = open_runner(folder), open_runner(folder, kv_dtype="fp8")
    tokens = torch.randint(0, tiny.VOCAB, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = target_logits(runner, tokens, [160])
    found = target_logits(own, tokens, [160])
    roundings: dict[str, Rounding] = {"bf16": lambda x: x.bfloat16().float(), "fp8": coded, "e5m2": in_e5m2}
    lost = {
        name: divergence(exact, next_tokens(runner, tokens, rounding, monkeypatch), sharpness)
        for name, rounding in roundings.items()
    }
    assert lost["fp8"] == pytest.approx(divergence(exact, found, sharpness), rel=0.1)
    assert 10 * lost["bf16"] < lost["fp8"] < lost["e5m2"] / 2
    assert lost["fp8"] < most * (20 if sharpness > 1 else 1)


def test_pieces_of_a_prompt(tmp_path: Path) -> None:
    """In float64 the order of sums does not show."""
    folder = tiny.save(tiny.build("llama-gqa-tied"), tmp_path)
    runner = open_runner(folder, dtype="float64", kv_dtype="fp8")
    tokens = [7 * i % tiny.VOCAB for i in range(60)]
    whole = target_logits(runner, tokens, [60])
    for feeds in ([1] * 60, [50, 1, 4, 5], [3, 57]):
        torch.testing.assert_close(target_logits(runner, tokens, feeds), whole, rtol=1e-9, atol=1e-9)
