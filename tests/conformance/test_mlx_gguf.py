"""GGUF files of Qwen3.5 and Qwen3-Next on MLX: the tokens of the PyTorch runner on the same file, drafts included."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
from harness import Ask, Traffic, alone, open_gguf_runner
from test_gguf import MODELS, TOKENS, mixed
from tiny_gguf import Options

from slipstream.config import EngineConfig
from slipstream.errors import UnknownModel
from slipstream.sampling import SamplingParams

pytest.importorskip("mlx_lm", reason="MLX is not installed: pip install '.[mlx]'")

from mlx_tiny import open_mlx

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, seed=1, draft=3)
ASKS = [Ask(tuple(TOKENS[:20]), GREEDY), Ask(tuple(TOKENS[20:27]), GREEDY, arrival=3)]


FEWER_BITS = {
    "attn_qkv": "Q5_0",
    "attn_gate": "Q5_1",
    "ssm_out": "MXFP4",
    "attn_output": "IQ4_XS",
    "attn_q": "IQ4_NL",
    "ffn_gate": "IQ3_S",
    "ffn_up": "Q5_K",
    "ffn_down": "MXFP4",
    "eh_proj": "IQ3_XXS",
    "token_embd": "Q5_0",
    "output": "Q3_K",
}


def fewer_bits(name: str) -> str:
    """Types that MLX packs into other numbers of bits than 4 and 8, or by a table."""
    return next((kind for part, kind in FEWER_BITS.items() if part in name), "Q8_0")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense-three-values", Options()),
        ("dense-yarn", Options()),
        ("dense", Options(mixed)),
        ("moe", Options(mixed)),
        ("moe", Options(lambda name: "Q4_1", fused=True)),
        ("next", Options(mixed)),
        ("dense", Options(fewer_bits)),
        ("moe", Options(fewer_bits, fused=True)),
    ],
    ids=[
        *("three values", "yarn", "dense", "experts", "fused experts", "qwen3next", "fewer bits"),
        "experts in fewer bits",
    ],
)
def test_tokens_equal_pytorchs(tmp_path: Path, kind: str, options: Options) -> None:
    path = tiny_gguf.write(MODELS[kind](), tmp_path / "x.gguf", options).path
    traffic = Traffic(open_mlx(path), EngineConfig(max_streams=4))
    runner = open_gguf_runner(path)
    assert traffic.run(ASKS) == [alone(runner, ask) for ask in ASKS]
    assert traffic.snapshot.num_draft_tokens > 0


def test_irregular_layers_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    flags = [kind == "linear_attention" for kind in (*kinds, "full_attention")]
    options = Options(metadata=(("qwen35.attention.recurrent_layers", flags),))
    path = tiny_gguf.write(tiny_gguf.wide(layer_types=kinds), tmp_path / "x.gguf", options).path
    with pytest.raises(UnknownModel, match="take --runner torch"):
        open_mlx(path)


def test_types_that_mlx_can_pack_stay_packed(tmp_path: Path) -> None:
    from mlx.utils import tree_flatten

    from slipstream.load import open_model
    from slipstream.runners.mlx.loaders.models import load_target

    path = tiny_gguf.write(MODELS["moe"](), tmp_path / "x.gguf", Options(mixed)).path
    model = dict(tree_flatten(load_target(open_model(str(path)), "float32").parameters()))
    packed = {name.removesuffix(".scales") for name in model if name.endswith(".scales")}
    layer = "language_model.model.layers.0"
    assert {f"{layer}.mlp.switch_mlp.gate_proj", f"{layer}.linear_attn.out_proj"} <= packed  # Q4_K
    assert f"{layer}.mlp.switch_mlp.down_proj" not in packed  # Q6_K
    assert model[f"{layer}.mlp.switch_mlp.gate_proj.weight"].nbytes == 8 * 256 * 256 // 2
    assert model[f"{layer}.linear_attn.in_proj_qkv.weight"].nbytes == 512 * 256 * 5 // 8  # Q5_K
