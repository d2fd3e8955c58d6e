"""Ragged paged attention against the PyTorch reference: tiles, splits, gates, padding."""

from __future__ import annotations

import pytest
import torch
from paged import Row, coded, floats, make_case
from some_gpus import HOPPER

from slipstream.runners.cuda.kernels.attention.attention import attend
from slipstream.runners.cuda.kernels.attention.tiles import (
    even_split_count,
    num_busy_programs,
    plan_blocks,
    split_count,
)
from slipstream.runners.torch.ops import HeadShape, LayerKv, TorchOps

DECODE = [Row(7, 3, room=4), Row(150, 1), Row(0, 0, room=2), Row(0, 4)]
PROMPT = [Row(0, 17), Row(35, 3), Row(20, 1)]


def check(
    device: torch.device,
    rows: list[Row],
    heads: HeadShape,
    block_size: int = 16,
    *,
    tile_size: int = 4,
    hint: int = 0,
    gated: bool = False,
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
    in_codes: bool = False,
) -> None:
    case = make_case(rows, heads, block_size, device, dtype, tile_size=tile_size, hint=hint)
    width = heads.num_q * heads.dim
    wide = factor * torch.randn(case.padded.num_tokens, 2 * width + 3, device=device, dtype=dtype)
    q, gate = wide[:, :width], wide[:, width + 3 :] if gated else None
    caches = coded(spread(case.kv)) if in_codes else case.kv
    got = attend(q, heads, caches, case.padded, gate)
    # The reference reads whole blocks: entries after a row's end must be finite there, and only there.
    kv = floats(caches) if in_codes else LayerKv(case.kv.k.float().nan_to_num(), case.kv.v.float().nan_to_num())
    ops = TorchOps(device, torch.float32)
    want = ops.attend(q[case.real].float(), heads, kv, case.ragged)
    if gate is not None:
        want = want * gate[case.real].float().sigmoid()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert got.dtype == dtype
    torch.testing.assert_close(got[case.real].float(), want, rtol=tolerance, atol=tolerance)
    padding = torch.ones(got.shape[0], dtype=torch.bool, device=device)
    padding[case.real] = False
    assert (got[padding] == 0).all()


def spread(kv: LayerKv) -> LayerKv:
    """Positions of different size, so that their scales differ."""
    k, v = (x * torch.exp2(torch.randint(-2, 3, (*x.shape[:-1], 1), device=x.device)) for x in (kv.k, kv.v))
    return LayerKv(k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hint", [0, 600], ids=["whole", "split"])
def test_decode(device: torch.device, dtype: torch.dtype, gated: bool, hint: int) -> None:
    check(device, DECODE, HeadShape(6, 2, 64), gated=gated, dtype=dtype, hint=hint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hint", [0, 600], ids=["whole", "split"])
def test_decode_in_codes(device: torch.device, dtype: torch.dtype, hint: int) -> None:
    check(device, DECODE, HeadShape(6, 2, 64), gated=True, dtype=dtype, hint=hint, in_codes=True)


@pytest.mark.parametrize(
    ("heads", "block_size"), [(HeadShape(6, 1, 256), 16), (HeadShape(2, 2, 80), 4), (HeadShape(4, 1, 16), 1)], ids=str
)
def test_shapes_in_codes(device: torch.device, heads: HeadShape, block_size: int) -> None:
    check(device, [Row(40, 2), Row(3, 1, room=2)], heads, block_size, tile_size=2, in_codes=True)


@pytest.mark.parametrize("hint", [0, 300], ids=["whole", "split"])
def test_prompts_in_codes(device: torch.device, hint: int) -> None:
    check(device, PROMPT, HeadShape(6, 1, 64), 4, tile_size=32, hint=hint, dtype=torch.bfloat16, in_codes=True)


def test_prompts_in_wide_tiles_and_codes(device: torch.device) -> None:
    rows, heads = [Row(150, 70), Row(63, 2)], HeadShape(6, 1, 256)
    check(device, rows, heads, tile_size=64, gated=True, dtype=torch.bfloat16, in_codes=True)


@pytest.mark.parametrize(
    ("heads", "block_size"),
    [(HeadShape(6, 1, 256), 16), (HeadShape(2, 2, 80), 4), (HeadShape(6, 1, 96), 16), (HeadShape(4, 1, 16), 1)],
    ids=str,
)
@pytest.mark.parametrize("tile_size", [1, 2, 8])
def test_shapes(device: torch.device, heads: HeadShape, block_size: int, tile_size: int) -> None:
    check(device, [Row(40, 2), Row(3, 1, room=2)], heads, block_size, tile_size=tile_size)


@pytest.mark.parametrize("length", [127, 128, 129, 256, 257, 600])
def test_contexts_that_end_at_and_around_splits(device: torch.device, length: int) -> None:
    check(device, [Row(length - 3, 3)], HeadShape(3, 1, 64), hint=640, gated=True)


@pytest.mark.each_value
@pytest.mark.parametrize("hint", [0, 300], ids=["whole", "split"])
@pytest.mark.parametrize("tile_size", [16, 32])
@pytest.mark.parametrize("heads", [HeadShape(6, 1, 64), HeadShape(3, 3, 80)], ids=str)
def test_prompts(device: torch.device, heads: HeadShape, tile_size: int, hint: int) -> None:
    check(device, PROMPT, heads, 4, tile_size=tile_size, hint=hint, dtype=torch.bfloat16)


@pytest.mark.parametrize("hint", [0, 300, 70_000], ids=["whole", "two", "many"])
def test_prompts_in_wide_tiles(device: torch.device, hint: int) -> None:
    """Rows that begin, end and see in the middle of blocks of positions; decoding rows beside them."""
    assert plan_blocks(64 * 6, 256, 2, few=False, shared_bytes=HOPPER.shared_bytes).wide
    rows = [Row(150, 70), Row(0, 66), Row(63, 2), Row(400, 1)]
    check(device, rows, HeadShape(6, 1, 256), tile_size=64, hint=hint, gated=True, dtype=torch.bfloat16)


def test_long_prompts_split_evenly() -> None:
    assert even_split_count(156, 131072, 132, 768) == 5  # 6 rounds of a fifth instead of two whole ones
    assert even_split_count(156, 131072, 132, 2048) == 2
    assert even_split_count(156, 131072, 132, 8192) == 1
    assert even_split_count(156, 32768, 132, 768) == 1
    assert even_split_count(12, 32768, 132, 64) == 11
    assert even_split_count(12, 256, 132, 64) == 2


def test_few_tokens_of_a_prompt_leave_no_processor_idle() -> None:
    """Beside eight decoding rows, in room for sixteen."""
    assert num_busy_programs(96, 1 + 16, 3) == 2 * 3 + 7
    assert num_busy_programs(2048, 32 + 1, 3) == 32 * 3
    for num_tokens, parts in ((64, 3), (96, 5), (320, 3), (384, 5)):
        num_programs = 4 * num_busy_programs(num_tokens, num_tokens // 64 + 16, 3)
        assert even_split_count(num_programs, 32768, 132, num_tokens) == parts
        assert num_programs * parts / (132 * -(-num_programs * parts // 132)) > 0.75
    assert even_split_count(4 * num_busy_programs(512, 8 + 1, 3), 32768, 132, 512) == 4  # a prompt alone
    assert even_split_count(4 * num_busy_programs(1024, 16 + 1, 3), 32768, 132, 1024) == 1


def test_a_prompt_longer_than_a_split(device: torch.device) -> None:
    """Its early tiles see nothing of the last split."""
    check(device, [Row(0, 140)], HeadShape(1, 1, 16), tile_size=64, hint=256)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    check(device, [Row(140, 2)], HeadShape(2, 1, 32), hint=300, factor=300.0)


def test_split_count_fills_the_machine_but_keeps_splits_long() -> None:
    assert split_count(4, 100, 132) == 1
    assert split_count(4, 130, 132) == 1
    assert split_count(4, 1024, 132) == 8
    assert split_count(4, 65536, 132) == 132
    assert split_count(256, 4096, 132) == 1
    assert split_count(1000, 65536, 132) == 1
