"""On a GPU: what it costs to keep recurrent states, in the 27B's shapes, and that they are right.

`python tests/runners/cuda/keep_report.py` prints one JSON object a line: microseconds of one layer's recurrence with
state slots compiled out, with none kept, and with one kept by every row; the same for a prompt; and a start's copy of
all layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from test_gdn import DEPTH, device_batch, on, weights
from torch import Tensor
from triton.testing import do_bench

from slipstream.engine.contract import MAX_KEEPS, Keep
from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.batch import DeviceBatch
from slipstream.runners.cuda.kernels.recurrent.gdn import gdn_mix
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.caches import GdnRings

GDN, NUM_LAYERS = GdnSpec(16, 48, 128, 128, 4), 48
GPU, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (1, 4, 8, 16, 64)
PROMPTS = (300, 2048)
CHECKED = 1024


def mixing(spans: list[RowSpan], rings: GdnRings) -> Callable[[DeviceBatch], Tensor]:
    """One layer's recurrence over these rows."""
    width = GDN.conv_channels + GDN.num_v_heads * GDN.v_dim + 2 * GDN.num_v_heads
    mixed = torch.randn(sum(span.num_fed for span in spans), width, device=GPU, dtype=BF16)
    made, layer = on(GPU, weights(GDN, BF16)), rings.layers[0]
    return lambda batch: gdn_mix(mixed[: batch.num_tokens], *made, layer.state, layer.ring, batch)


def report(name: str, spans: list[RowSpan], rings: GdnRings, position: int) -> None:
    """``position``: where each row keeps its state, in the step's last column."""
    has_prompts = any(span.num_fed > 1 + DEPTH for span in spans)
    num_slots = rings.layers[0].state.shape[0] // 2
    keeping = [replace(span, keeps=(Keep(position, num_slots + span.slot),)) for span in spans]
    kept, plain = (device_batch(rows, 0, GPU, has_prompts) for rows in (keeping, spans))
    cases = {"compiled_out": replace(plain, max_keeps=0), "none": replace(plain, max_keeps=MAX_KEEPS), "one_each": kept}
    mix = mixing(spans, rings)
    graphs = {}
    for case, batch in cases.items():
        mix(batch)
        torch.cuda.synchronize()
        graphs[case] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[case]):
            mix(batch)
    best = {case: min(do_bench(graph.replay, rep=50) for _ in range(5)) for case, graph in graphs.items()}
    print(json.dumps({"case": name, **{case: round(1e3 * ms, 1) for case, ms in best.items()}}), flush=True)


def check(rings: GdnRings) -> None:
    """A long prompt keeps its state in the middle: that of a prompt which ends there."""
    span = RowSpan(0, 0, 0, 2 * CHECKED, keeps=(Keep(CHECKED, 3),))
    mix = mixing([span], rings)
    mix(device_batch([span], 0, GPU, True))
    layer = rings.layers[0]
    kept, window = layer.state[3].clone(), [p % layer.ring.shape[1] for p in range(CHECKED - 3, CHECKED)]
    ring = layer.ring[3, window, : GDN.conv_channels].clone()
    stopped = device_batch([RowSpan(0, 0, 0, CHECKED)], 0, GPU, True)
    mix(stopped)
    error = float((kept - layer.state[0]).norm() / kept.norm())
    same_ring = bool(torch.equal(ring, layer.ring[0, window, : GDN.conv_channels]))
    print(json.dumps({"case": "kept against stopped", "state_error": error, "same_inputs": same_ring}), flush=True)


def main() -> None:
    torch.manual_seed(0)
    rings = GdnRings(GDN, 1, 64, 64, DEPTH, GPU, BF16)
    check(rings)
    for num_rows in ROWS:
        for num_drafts in (0, DEPTH):
            fed = 1 + num_drafts
            spans = [RowSpan(slot, 95, slot * fed, 1, num_drafts) for slot in range(num_rows)]
            report(f"{num_rows} rows of {fed}", spans, rings, 96)
    for length in PROMPTS:
        report(f"prompt of {length}", [RowSpan(0, 1024, 0, length)], rings, 1024 + 256)
    rings = GdnRings(GDN, NUM_LAYERS, 8, 8, DEPTH, GPU, BF16)
    milliseconds = do_bench(lambda: rings.copy(9, 1))
    print(json.dumps({"case": "copy of all layers", "microseconds": round(1e3 * milliseconds, 1)}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
