"""Quantised folders in the layouts of published ones: logits are those of `transformers` with the same weights, and
greedy tokens with the head are those without."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_packed
import torch
from harness import Ask, Traffic, alone, open_runner, target_logits
from safetensors import safe_open

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.errors import UnknownModel
from slipstream.load import dequantize, open_model
from slipstream.load.hf.folder import open_hf
from slipstream.load.read_ahead import places_in_order
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.ops import ReorderedLinear, TorchOps, order_bytes
from slipstream.runners.torch.weights import DenseFormat, linear_in_order
from slipstream.sampling import SamplingParams

TOKENS = torch.randint(0, tiny.VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()
FEEDS = [5, 17, 1, 1, 1, 3, 32]
WITH_HEAD = [name for name, layout in tiny_packed.LAYOUTS.items() if layout.has_head]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """The folder of each layout, and transformers' logits. [tokens, vocab]"""
    made = {}
    for name, layout in tiny_packed.LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        model = tiny_packed.save(layout, folder)
        with torch.no_grad():
            made[name] = folder, model(torch.tensor([TOKENS])).logits[0]
    return made


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", tiny_packed.LAYOUTS)
def test_logits(folders: dict[str, tuple[Path, torch.Tensor]], name: str, kernels: bool) -> None:
    folder, expected = folders[name]
    assert expected.std() > 0.3, "logits so flat that anything would agree"
    logits = target_logits(open_runner(folder, kernels=kernels), TOKENS, FEEDS)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.each_value
@pytest.mark.parametrize(("dtype", "kernels"), [("float64", False), ("auto", True)], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", WITH_HEAD)
def test_drafts_change_no_token(
    folders: dict[str, tuple[Path, torch.Tensor]], name: str, dtype: str, kernels: bool
) -> None:
    runner = open_runner(folders[name][0], head=True, dtype=dtype, kernels=kernels)
    greedy = SamplingParams(temperature=0.0, max_tokens=30, seed=1, draft=3)
    asks = [Ask(tuple(TOKENS[:20]), greedy), Ask(tuple(TOKENS[20:27]), greedy, arrival=3)]
    traffic = Traffic(runner, EngineConfig(max_streams=4))
    assert traffic.run(asks) == [alone(runner, ask) for ask in asks]
    assert traffic.snapshot.num_draft_tokens > 0


@pytest.mark.parametrize("name", tiny_packed.LAYOUTS)
def test_names_and_bytes(folders: dict[str, tuple[Path, torch.Tensor]], name: str) -> None:
    """Every matrix under the name that it has in the original; the head is where the tensors are."""
    folder, layout = folders[name][0], tiny_packed.LAYOUTS[name]
    model = open_model(str(folder))
    assert (model.head is not None) == layout.has_head
    assert model.head_reason == (
        ""
        if layout.has_head
        else "no MTP head: config.json announces 1 MTP layer(s), but the "
        "checkpoint has no mtp.* tensors; give one with --mtp"
    )
    suffix = re.compile(r"(scale|scales|packed|qweight|qzeros|g_idx|shape|zero_point|scale_\d|inv|qkvz|_ba\.weight)$")
    assert not [each for each in model.checkpoint.names() if suffix.search(each)]
    stored = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {each: file.get_tensor(each).nbytes for each in file.keys()}  # noqa: SIM118
    unused = sum(size for each, size in stored.items() if "visual" in each or "self_attn.k_scale" in each)
    unused += sum(size for each, size in stored.items() if "self_attn.v_scale" in each)
    assert model.num_bytes == pytest.approx(sum(stored.values()) - unused, abs=64)
    assert sum(place.stop - place.start for place in places_in_order(model)) == sum(stored.values()) - unused


def test_a_part_of_a_joined_matrix(folders: dict[str, tuple[Path, torch.Tensor]]) -> None:
    checkpoint = open_hf(folders["next-gptq"][0])
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    assert name in checkpoint
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" not in checkpoint
    assert checkpoint.get(name).name == name
    assert checkpoint.get(name).shape == checkpoint.shape(name) == (64, 64)
    assert checkpoint.dtype(name) == "INT4_32"


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("more", [{}, {"linear_num_key_heads": 4}, {"linear_num_key_heads": 1}])
def test_qwen3_next_without_quantisation(tmp_path: Path, more: dict[str, int], stacked: bool, kernels: bool) -> None:
    torch.manual_seed(0)
    model = tiny.randomise(tiny.next_moe(**more))
    tiny.save(model, tmp_path, head=stacked)  # transformers writes the experts apart, we write them stacked
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    logits = target_logits(open_runner(tmp_path, kernels=kernels), TOKENS, FEEDS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert (open_model(str(tmp_path)).head is not None) == stacked


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", ["quanttrio-awq", "unsloth-nvfp4", "int8", "gptq-act-order", "cyankiwi-stacked"])
def test_what_is_planned_is_what_is_loaded(
    folders: dict[str, tuple[Path, torch.Tensor]], name: str, dtype: str
) -> None:
    checkpoint = open_hf(folders[name][0])
    form = TorchBackend(RunnerConfig("cpu", dtype)).platform(checkpoint.spec).form
    reordered = 0
    for each in checkpoint.names():
        raw = checkpoint.get(each)
        assert checkpoint.is_reordered(each) == (raw.order is not None)
        if len(raw.shape) == 2 and raw.shape[0] > 1:
            made = linear_in_order(form, [raw], None, torch.device("cpu"))
            order = order_bytes(raw.shape[1]) if isinstance(made, ReorderedLinear) else 0
            assert form.stored_bytes(checkpoint.dtype(each), raw.shape) + order == made.num_bytes, each
            reordered += order
    assert (reordered > 0) == (name == "gptq-act-order")


def test_orders_of_columns_are_planned(folders: dict[str, tuple[Path, torch.Tensor]]) -> None:
    model, config = open_model(str(folders["gptq-act-order"][0])), RunnerConfig("cpu", kv_memory=8_000_000)
    backend, checkpoint = TorchBackend(config), model.checkpoint
    form, plan = backend.platform(model.spec).form, backend.plan_memory(model, EngineConfig(max_streams=2))
    names = [name for name in checkpoint.names() if not name.startswith("mtp.")]
    stored = sum(form.of(name).stored_bytes(checkpoint.dtype(name), checkpoint.shape(name)) for name in names)
    orders = [order for name in names if (order := checkpoint.get(name).order) is not None]
    assert plan.weights == stored + sum(16 * len(order) for order in orders)
    assert len(orders) > 4


def test_parts_in_different_orders(folders: dict[str, tuple[Path, torch.Tensor]]) -> None:
    """A stack of products, each with its own order, and one without."""
    checkpoint = open_hf(folders["gptq-act-order"][0])
    names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"]
    q, k, v = (checkpoint.get(name) for name in names)
    assert q.order is not None
    k = replace(k, order=q.order[::-1].copy())
    v = replace(v, order=None)
    ops = TorchOps(torch.device("cpu"), torch.float64)
    x, whole = torch.randn(5, 64).double(), torch.cat([torch.from_numpy(dequantize(part)) for part in (q, k, k, v)])
    bias = torch.arange(len(whole)).double()
    made = linear_in_order(DenseFormat(ops), [q, k, k, v], bias, ops.device)
    torch.testing.assert_close(made(x), x @ whole.double().T + bias)
    assert made.num_out == len(whole)


def test_rows_of_a_matrix_in_act_order(folders: dict[str, tuple[Path, torch.Tensor]]) -> None:
    raw = open_hf(folders["gptq-act-order"][0]).get("model.layers.0.mlp.up_proj.weight")
    ops = TorchOps(torch.device("cpu"), torch.float32)
    made = linear_in_order(DenseFormat(ops), [raw], None, ops.device)
    ids = torch.tensor([3, 0, 17])
    torch.testing.assert_close(made.rows(ids), torch.from_numpy(dequantize(raw))[ids])
    x = torch.randn(2, raw.shape[1])
    torch.testing.assert_close(made.for_drafts(24)(x), made(x)[:, :24])


def test_experts_in_act_order_are_refused(tmp_path: Path) -> None:
    layout = replace(tiny_packed.LAYOUTS["quanttrio-awq"], rules=[(r"experts\.\d", "gptq-act-order")])
    tiny_packed.save(layout, tmp_path)
    with pytest.raises(UnknownModel, match=r"quantised in act-order \(desc_act\)"):
        open_runner(tmp_path)
