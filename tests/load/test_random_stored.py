"""Made-up weights in the types of quantised files: sane numbers, the types of each kind of file."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.errors import LoadError
from slipstream.load.dequantize import dequantize
from slipstream.load.random.mixes import STORED_AS
from slipstream.load.random.model import open_random
from slipstream.load.random.stored import HALVES, StoredRandomCheckpoint, random_rows

FOLDERS = [name for name in STORED_AS if name.startswith(("INT", "FP"))]


@pytest.mark.parametrize("dtype", [*HALVES, *FOLDERS])
def test_weights_keep_the_size_of_activations(dtype: str) -> None:
    weights = dequantize(random_rows(dtype, 300, 512, seed=1))
    assert weights.shape == (300, 512)
    assert abs(weights.std() * 512**0.5 - 1) < 0.05
    assert abs(weights.mean()) < 0.15 * weights.std()
    assert len(np.unique(weights, axis=0)) == 300, "rows are alike"


@pytest.mark.parametrize("stored_as", STORED_AS)
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_every_tensor_can_be_read(shape: str, stored_as: str) -> None:
    checkpoint = open_random(shape, stored_as=stored_as).checkpoint
    assert isinstance(checkpoint, StoredRandomCheckpoint)
    for name in checkpoint.names():
        raw = checkpoint.get(name)
        assert (raw.dtype, raw.shape) == (checkpoint.dtype(name), checkpoint.shape(name))
        assert np.isfinite(dequantize(raw)).all()


def test_types_of_a_mix() -> None:
    checkpoint = open_random("qwen3.5-27b", stored_as="Q4_K_M").checkpoint
    layer = "model.layers.3.self_attn."
    assert checkpoint.dtype("lm_head.weight") == checkpoint.dtype(f"{layer}v_proj.weight") == "Q6_K"
    assert checkpoint.dtype("model.layers.9.mlp.down_proj.weight") == "Q4_K"
    assert checkpoint.dtype("model.layers.0.linear_attn.in_proj_qkv.weight") == "Q5_K"
    assert checkpoint.dtype("model.layers.0.linear_attn.A_log") == "F32"
    total = sum(checkpoint.num_bytes(name) for name in checkpoint.names())
    assert 15.5e9 < total < 17.5e9


def test_a_mix_that_does_not_exist() -> None:
    with pytest.raises(LoadError, match="is not one of"):
        open_random("tiny", stored_as="Q9")
