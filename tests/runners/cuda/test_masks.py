"""Masks: the kernel against plain indexing, at vocabularies that fill no byte and no block."""

from __future__ import annotations

import pytest
import torch

from slipstream.runners.cuda.kernels.sampling.masks import apply_masks
from slipstream.sampling.masks import num_bytes, only


@pytest.mark.parametrize("vocab_size", [97, 4096, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_is_allowed_is_left(device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    allowed = [[0, 7, 8, vocab_size - 1], [vocab_size // 2]]
    packed = b"".join(only(tokens, vocab_size) for tokens in allowed)
    masks = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(2, num_bytes(vocab_size)).to(device)
    logits = torch.randn(5, vocab_size + 3, device=device).to(dtype)[:, :vocab_size]  # rows that lie apart
    index = torch.tensor([1, -1, 0, 0, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([2, 0, 1, -1, 0], dtype=torch.int32, device=device)  # the fourth is padding
    wanted = logits.clone()
    for position, which in ((0, 1), (2, 0), (4, 1)):
        lost = torch.ones(vocab_size, dtype=torch.bool, device=device)
        lost[allowed[which]] = False
        wanted[position, lost] = float("-inf")
    apply_masks(logits, slots, index, masks)
    assert torch.equal(logits, wanted)
