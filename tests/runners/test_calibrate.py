"""The order in which sizes are timed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from slipstream.runners.torch import calibrate
from slipstream.runners.torch.ops import TorchOps


def test_small_work_is_timed_before_large_and_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    tasks = {("verify", n): partial(done.append, n) for n in (64, 1, 8)}
    ops = TorchOps(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(calibrate, "SETTLING", 0.0)
    assert calibrate._take_turns(tasks, ops).keys() == tasks.keys()
    assert done == [1, 8, 64] * (calibrate.ROUNDS + 1)
    done.clear()
    monkeypatch.setattr(calibrate, "SETTLING", 0.001)
    calibrate._take_turns(tasks, ops)
    starts = [i for i, n in enumerate(done) if i == 0 or done[i - 1] == 64]
    assert len(starts) == calibrate.ROUNDS + 1
    assert all(done[i : i + 2] == [1, 1] for i in starts)  # one of them, at least, was not timed
