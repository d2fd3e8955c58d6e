"""Float32 logits equal `transformers`' on the same files, for every family and every way to feed a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from harness import open_runner, target_logits

TOKENS = torch.randint(0, tiny.VOCAB, (90,), generator=torch.Generator().manual_seed(3)).tolist()
FEEDS = {
    "whole": [90],
    "chunks": [20, 64, 6],
    "tokens": [1] * 90,
    "ragged": [5, 17, 1, 1, 1, 3, 62],
}


@pytest.fixture(scope="module", params=tiny.MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    model = tiny.build(request.param)
    folder = tiny.save(model, tmp_path_factory.mktemp("model"))
    with torch.no_grad():
        return folder, model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.each_pair
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("feed", FEEDS)
def test_logits_equal_transformers(pair: tuple[Path, torch.Tensor], feed: str, kernels: bool) -> None:
    folder, expected = pair
    runner = open_runner(folder, kernels=kernels)
    logits = target_logits(runner, TOKENS, FEEDS[feed])
    assert expected.std() > 0.3, "logits so flat that anything would agree"
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
