"""top_k, top_p and min_p: what the kernel keeps against what the sorted reference keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.runners.cuda.kernels.sampling import truncate as module
from slipstream.runners.cuda.kernels.sampling.truncate import truncate
from slipstream.runners.torch.sampling.processors import History, Truncation

# top_k, top_p, min_p, inverse temperature
ASKED = {
    "nothing": (0, 1.0, 0.0, 1.0),
    "one": (1, 1.0, 0.0, 1.0),
    "k": (20, 1.0, 0.0, 1.3),
    "large k": (300, 1.0, 0.0, 1.0),
    "p": (0, 0.9, 0.0, 1.0),
    "hot p": (0, 0.97, 0.0, 0.2),
    "tiny p": (0, 1e-6, 0.0, 1.0),
    "min_p": (0, 1.0, 0.1, 0.7),
    "k and p": (40, 0.8, 0.0, 1.5),
    "all": (50, 0.95, 0.02, 0.5),
    "k and min_p": (50, 1.0, 0.3, 1.0),
    "k of all": (10**6, 1.0, 0.0, 1.0),
    "cold": (20, 0.95, 0.0, 1e6),
}


def slots_of(device: torch.device, names: list[str]) -> dict[str, Tensor]:
    top_k, top_p, min_p, inv_temperature = zip(*ASKED.values(), strict=True)
    return {
        "slots": torch.tensor([list(ASKED).index(name) for name in names], dtype=torch.int32, device=device),
        "inv_temperature": torch.tensor(inv_temperature, device=device),
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=device),
        "top_p": torch.tensor(top_p, device=device),
        "min_p": torch.tensor(min_p, device=device),
    }


def kept(logits: Tensor) -> list[int]:
    return torch.nonzero(logits > float("-inf"))[:, 0].tolist()


def bounds(row: Tensor, name: str) -> tuple[list[int], list[int]]:
    """What the reference keeps if its borders are moved a little inwards and outwards: sums round."""
    top_k, top_p, min_p, inv_temperature = ASKED[name]
    sets = []
    for slack in (-2e-5, 2e-5):
        p = top_p if top_p == 1.0 else min(top_p * (1 + slack), 1.0 - 1e-9)
        want = row.double()
        Truncation(inv_temperature, top_k, p, min_p * (1 - slack))(want, History(row[:0].long(), 0))
        sets.append(kept(want))
    return sets[0], sets[1]


def check(before: Tensor, after: Tensor, name: str) -> None:
    smallest, largest = (set(ids) for ids in bounds(before, name))
    got = set(kept(after))
    assert smallest <= got <= largest, name
    assert torch.equal(after[list(got)], before[list(got)])
    if ASKED[name][1] == 1.0 and ASKED[name][2] == 0.0:
        assert smallest == largest == got  # counting does not round


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 77, 5003])
def test_truncate_equals_the_reference(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    names = list(ASKED)
    logits = 3 * torch.randn(len(names), vocab_size + 5, device=device).to(dtype)[:, 5:]
    before = logits.clone()
    truncate(logits, **slots_of(device, names))
    for i, name in enumerate(names):
        check(before[i], logits[i], name)
    assert torch.equal(logits[0], before[0])


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_of_many_equals_the_lowest_ids_stay(device: torch.device, spread: float) -> None:
    names = ["one", "k", "p", "all", "large k"]
    logits = (torch.randn(len(names), 2500, device=device) * spread).round()
    logits[1, :1000] = -0.0
    before = logits.clone()
    truncate(logits, **slots_of(device, names))
    for i, name in enumerate(names):
        check(before[i], logits[i], name)
    best = kept(logits[0])
    assert best == [int((before[0] == before[0].max()).nonzero()[0])]


def test_whole_row_when_candidates_are_too_many(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CANDIDATES", 16)
    names = ["k", "hot p", "all", "large k"]
    logits = torch.randn(len(names), 2100, device=device)
    before = logits.clone()
    truncate(logits, **slots_of(device, names))
    for i, name in enumerate(names):
        check(before[i], logits[i], name)


def test_masked_tokens_stay_masked(device: torch.device) -> None:
    """A grammar left three tokens, fewer than k."""
    names = ["k", "p", "all", "min_p", "k"]
    logits = torch.full((len(names), 1300), float("-inf"), device=device)
    logits[:4, [7, 600, 1299]] = torch.tensor([0.5, 1.0, 0.75], device=device)
    before = logits.clone()
    truncate(logits, **slots_of(device, names))
    for i, name in enumerate(names[:4]):
        check(before[i], logits[i], name)
    assert kept(logits[0]) == [7, 600, 1299]
    assert kept(logits[4]) == []


def test_padding_is_left_alone_and_rows_do_not_mix(device: torch.device) -> None:
    logits = torch.randn(4, 3000, device=device)
    asked = slots_of(device, ["all", "k", "p", "all"])
    asked["slots"][1] = -1
    together, alone = logits.clone(), logits.clone()
    truncate(together, **asked)
    assert torch.equal(together[1], logits[1])
    truncate(alone[3:], **{**asked, "slots": asked["slots"][3:]})
    assert torch.equal(alone[3], together[3])
