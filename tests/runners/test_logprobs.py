"""The likeliest tokens in order, ties and all, and what the host reads of a step."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.contract import TokenLogprobs
from slipstream.runners.logprobs import read_logprobs
from slipstream.runners.torch.sampling.logprobs import hidden_logprobs, likeliest, log_probabilities, token_logprobs


def chances_with_ties() -> torch.Tensor:
    """Whole numbers, so that many are equal, with both zeros among them."""
    chances = torch.randn(5, 97, generator=torch.Generator().manual_seed(0)).round()
    chances[0, 1], chances[0, 3] = 0.0, -0.0
    return chances


def in_order(chances: torch.Tensor, count: int) -> list[list[int]]:
    return [[i for _, i in sorted((-x, i) for i, x in enumerate(row))][:count] for row in chances.tolist()]


@pytest.mark.parametrize("count", [0, 1, 20, 97])
def test_the_likeliest_come_first_and_of_equals_the_lower_id(count: int) -> None:
    chances = chances_with_ties()
    assert likeliest(chances, count).tolist() == in_order(chances, count)


@pytest.mark.parametrize("count", [0, 1, 20, 97])
def test_the_same_on_mlx(count: int) -> None:
    mx = pytest.importorskip("mlx.core")
    from slipstream.runners.mlx.sampling.logprobs import likeliest as mlx_likeliest

    chances = chances_with_ties()
    assert mlx_likeliest(mx.array(chances.numpy()), count).tolist() == in_order(chances, count)


def test_pieces_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # In eighths, so that products have the same bits whatever the number of rows: no sum of them is rounded.
    chance = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randint(-16, 17, (rows, 8), generator=chance) / 8 for rows in (97, 11))
    tokens = torch.arange(11)
    whole = token_logprobs(log_probabilities(hidden @ weight.T), tokens, 3)
    shapes: list[int] = []

    def chances(part: torch.Tensor) -> torch.Tensor:
        shapes.append(part.shape[0])
        return log_probabilities(part @ weight.T)

    monkeypatch.setattr("slipstream.runners.torch.sampling.logprobs.PIECE", 97 * 4)
    assert torch.equal(hidden_logprobs(hidden, chances, 97, tokens, 3), whole)
    assert shapes == [4, 4, 3]


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    numbers = [-1.5, 7.0, 3.0, -0.5, -0.75]
    assert read_logprobs(numbers, 2) == TokenLogprobs(-1.5, ((7, -0.5), (3, -0.75)))
    assert read_logprobs(numbers, 1) == TokenLogprobs(-1.5, ((7, -0.5),))
    assert read_logprobs(numbers, 0) == TokenLogprobs(-1.5)
