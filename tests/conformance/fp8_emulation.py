"""transformers' models with the inputs of FP8 matrices rounded to FP8, in plain PyTorch: what our kernels should do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_fp8
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

TILE = 128
MAX_VALUE = 448.0


def rounded(x: Tensor) -> Tensor:
    """To e4m3 times a scale for each 128 columns of a token."""
    tiles = x.float().unflatten(-1, (-1, TILE))
    largest = tiles.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
    codes = (tiles * (MAX_VALUE / largest)).clamp(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn)
    return (codes.float() * (largest / MAX_VALUE)).flatten(-2).to(x.dtype)


def open_floats(folder: Path, dtype: torch.dtype, rounds: bool) -> PreTrainedModel:
    """A dense model of ``tiny_fp8.WHOLE`` with the weights that its codes stand for."""
    read = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=read).to(dtype)
    names = {name.removesuffix(".weight") for name in tiny_fp8.CONVERTED}
    for name, module in model.named_modules():
        if rounds and name.rpartition(".")[2] in names:
            module.register_forward_pre_hook(_round_input)
    return model


def _round_input(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounded(inputs[0]), *inputs[1:])
