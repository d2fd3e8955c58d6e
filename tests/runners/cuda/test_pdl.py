"""Before its wait a kernel reads only data that was there before the product in front of it.

In Triton's interpreter, program by program: data that earlier kernels of the layer write is NaN from a program's start
until it waits for the previous kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import test_attention
import test_gdn
import test_rope
import torch
from paged import Row
from torch import Tensor

from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.kernels import norm
from slipstream.runners.cuda.kernels.attention import attention, rope
from slipstream.runners.cuda.kernels.recurrent import gdn
from slipstream.runners.torch.ops import HeadShape, TorchOps

CPU = torch.device("cpu")


class Late:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.kept: list[Tensor] | None = None
        self.num_waits = 0

    def hide(self) -> None:
        assert self.kept is None, "a program ended without a wait"
        self.kept = [tensor.clone() for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.fill_(float("nan"))

    def show(self) -> None:
        assert self.kept is not None
        for tensor, kept in zip(self.tensors, self.kept, strict=True):
            tensor.copy_(kept)
        self.kept = None
        self.num_waits += 1


class Recorded:
    """PyTorch, with an eye on what is allocated: kernels hand it to each other."""

    def __init__(self, late: Late) -> None:
        self._late = late

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return self._kept(found) if name in ("empty", "empty_like") else found

    def _kept(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **options: Any) -> Tensor:
            self._late.tensors.append(allocate(*args, **options))
            return self._late.tensors[-1]

        return wrapped


@pytest.fixture
def late(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Late:
    if device.type != "cpu":
        pytest.skip("on a GPU kernels really overlap")
    made = Late()
    for module in (attention, gdn, norm, rope):
        _watch(module, made, monkeypatch)
    return made


def _watch(module: ModuleType, late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "launch_dependents", late.hide)
    monkeypatch.setattr(module, "wait_for_previous", late.show)
    monkeypatch.setattr(module, "torch", Recorded(late))
    monkeypatch.setattr(module, "uses_pdl", lambda: True, raising=False)


def given(function: Callable[..., Tensor], late: Late, *names: int) -> Callable[..., Tensor]:
    """With these of its arguments late, too."""

    def wrapped(*args: Any) -> Tensor:
        late.tensors[:] = [args[i] for i in names if args[i] is not None]
        got = function(*args)
        assert late.kept is None
        assert late.num_waits
        return got

    return wrapped


def test_recurrence(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gdn, "gdn_mix", given(gdn.gdn_mix, late, 0))
    both = test_gdn.Both(test_gdn.weights(GdnSpec(1, 2, 16, 16, 4), torch.float32), torch.float32, CPU)
    for rows in ([(0, 2, 0), (2, 1, 3)], [(0, 1, 3), (2, 1, 0)], [(2, 1, 2), (0, 1, 3)]):
        spans = both.spans(rows)
        assert max(both.step(spans, 1)) < 2e-5
        for span in spans:
            both.accept(span, span.num_drafts // 2)


@pytest.mark.parametrize("hint", [0, 600], ids=["whole", "split"])
def test_attention_and_its_merge(late: Late, hint: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_cache(q: Tensor, heads: HeadShape, kv: Any, batch: Any, gate: Tensor | None) -> Tensor:
        late.tensors[:] = [q, kv.k, kv.v, *([] if gate is None else [gate])]
        return attention.attend(q, heads, kv, batch, gate)

    monkeypatch.setattr(test_attention, "attend", with_cache)
    rows = [Row(7, 3, room=4), Row(150, 1), Row(0, 0, room=2)]
    test_attention.check(CPU, rows, HeadShape(2, 1, 32), hint=hint, gated=True)
    assert late.num_waits


def test_rotary(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_rope, "rope_store", given(rope.rope_store, late, 0))
    test_rope.test_against_the_reference(CPU, torch.float32, True, "odd partial")


def test_norms(late: Late) -> None:
    x, other, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    wanted = [TorchOps(CPU, torch.float32).rms_norm(each, weight, 1e-5) for each in (x, other)]
    assert torch.allclose(given(norm.rms_norm, late, 0)(x, weight, 1e-5), wanted[0], atol=1e-6)
    both = given(norm.concat_norm, late, 0, 2)(x, weight, other, weight, 1e-5)
    assert torch.allclose(both, torch.cat(wanted, dim=1), atol=1e-6)


def test_early_reads_are_found(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "wait_for_previous", lambda: None)
    x = torch.randn(3, 40)
    late.tensors[:] = [x]
    assert norm.rms_norm(x, torch.ones(40), 1e-5).isnan().all()
    with pytest.raises(Exception, match="without a wait"):
        norm.rms_norm(x, torch.ones(40), 1e-5)
