"""The fused recurrence against the reference, over steps with prompts, drafts, rejections and replays."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.load.spec import GdnSpec
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import make_batch
from slipstream.runners.torch.caches import GdnCache, GdnRings
from slipstream.runners.torch.cuda.batch import DeviceBatch
from slipstream.runners.torch.cuda.kernels.gdn import gdn_mix
from slipstream.runners.torch.ops import GdnWeights, TorchOps, gated_delta_net

DEPTH = 3
CPU = torch.device("cpu")


def weights(gdn: GdnSpec, dtype: torch.dtype) -> GdnWeights:
    return GdnWeights(
        conv=torch.randn(gdn.conv_kernel, gdn.conv_channels).to(dtype),
        decay_scale=-torch.rand(gdn.num_v_heads) * 4,
        dt_bias=torch.randn(gdn.num_v_heads),
        norm=torch.rand(gdn.v_dim) + 0.5,
        eps=1e-6,
        spec=gdn,
    )


def on(device: torch.device, made: GdnWeights) -> tuple[object, ...]:
    tensors = (made.conv, made.decay_scale, made.dt_bias, made.norm)
    return (*(t.to(device) for t in tensors), made.eps, made.spec)


def device_batch(spans: list[RowSpan], padding: int, device: torch.device, has_prompts: bool) -> DeviceBatch:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pad = [0] * padding
    nothing = ints([])
    return DeviceBatch(
        num_rows=len(spans) + padding,
        num_tokens=sum(s.num_fed for s in spans),
        tokens=nothing,
        positions=ints([s.start + j for s in spans for j in range(s.num_fed)]),
        token_slots=nothing,
        token_rows=ints([i for i, s in enumerate(spans) for _ in range(s.num_fed)]),
        row_slots=ints([s.slot for s in spans] + pad),
        row_offsets=ints([s.offset for s in spans] + pad),
        row_starts=ints([s.start for s in spans] + pad),
        row_fed=ints([s.num_fed for s in spans] + pad),
        row_certain=ints([s.num_certain for s in spans] + pad),
        row_replay=ints([s.num_replay for s in spans] + pad),
        max_replay=DEPTH,
        tile_rows=nothing,
        tile_firsts=nothing,
        tile_size=1,
        block_table=nothing,
        context_hint=512,
        has_prompts=has_prompts,
    )


@pytest.mark.parametrize(
    ("gdn", "dtype", "tolerance"),
    [
        (GdnSpec(2, 4, 16, 16, 4), torch.float32, 2e-5),
        (GdnSpec(1, 3, 16, 32, 4), torch.float32, 2e-5),
        (GdnSpec(2, 2, 32, 16, 4), torch.bfloat16, 3e-2),
    ],
)
def test_steps_equal_the_reference(gdn: GdnSpec, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    chance = random.Random(1)
    made = weights(gdn, dtype)
    reference = GdnCache(gdn, 1, 4, DEPTH, CPU, torch.float32)
    rings = GdnRings(gdn, 1, 4, DEPTH, device, dtype).layers[0]
    ops = TorchOps(CPU, torch.float32)
    width = gdn.conv_channels + gdn.num_v_heads * gdn.v_dim + 2 * gdn.num_v_heads
    cursors, replays = {0: 0, 2: 0, 3: 0}, {0: 0, 2: 0, 3: 0}
    for step in range(9):
        spans, offset = [], 0
        for slot in cursors:
            prompt = step < 2 or (slot == 3 and step == 5)
            certain = chance.choice([1, 5, 21]) if prompt else 1
            drafts = 0 if prompt else chance.randrange(DEPTH + 1)
            if slot == 2 and step == 4:  # another stream takes the slot
                cursors[slot], replays[slot] = 0, 0
                reference.layers[0].reset(slot)
            spans.append(RowSpan(slot, cursors[slot], offset, certain, drafts, replays[slot]))
            offset += certain + drafts
        mixed = torch.randn(offset, width).to(dtype)
        wanted = gated_delta_net(
            ops,
            mixed.float(),
            GdnWeights(made.conv.float(), made.decay_scale, made.dt_bias, made.norm, made.eps, gdn),
            reference.layers[0],
            make_batch(tuple(spans), [0] * offset, torch.zeros(4, 1, dtype=torch.int32)),
        )
        long = any(span.num_fed > 1 + DEPTH for span in spans)
        batch = device_batch(spans, step % 2, device, long)
        got = gdn_mix(mixed.to(device), *on(device, made), rings.state, rings.ring, batch)
        error = (got.cpu().float() - wanted).norm() / wanted.norm()
        assert error < tolerance, step
        for span in spans:
            replays[span.slot] = chance.randrange(span.num_drafts + 1)
            cursors[span.slot] = span.start + span.num_certain + replays[span.slot]
