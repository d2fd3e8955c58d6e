"""The PyTorch reference with recurrent states that are rounded after every token, as the Triton kernels store them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.runners.torch import gdn

Rounding = Callable[[Tensor], Tensor]
Steps = Callable[..., tuple[Tensor, Tensor]]


def as_stored(state: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return state.clamp(-largest, largest).to(dtype).to(state.dtype)


def rounding_steps(rounding: Rounding) -> Steps:
    """For ``gdn._steps``."""
    steps = gdn._steps

    def rounded(state: Tensor, *inputs: Tensor | slice) -> tuple[Tensor, Tensor]:
        *others, span = inputs
        assert isinstance(span, slice)
        outputs = [steps(state, *others, slice(span.start, span.start))[0]]
        for t in range(span.start, span.stop):
            out, state = steps(state, *others, slice(t, t + 1))
            state = rounding(state)
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    return rounded
