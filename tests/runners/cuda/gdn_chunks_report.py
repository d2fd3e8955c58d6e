"""On a GPU: the chunked recurrence of one layer (Gated DeltaNet), timed in the 27B's shapes and checked.

`python tests/runners/cuda/gdn_chunks_report.py` prints a line for each number of rows and of their tokens: microseconds
in all, of what is computed for all chunks at once, and of a chunk of what is left, which goes chunk by chunk; and how
far outputs and states are off those of the rule in float64, one token after the other. `--tiny` runs small shapes, to
see that the script does: without a GPU in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from quick_interpreter import quicken
from torch import Tensor
from torch.nn.functional import normalize, softplus

from slipstream.engine.contract import MAX_KEEPS
from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.graphs import replay_seconds
from slipstream.runners.cuda.kernels.recurrent import gdn_chunks

GDN, TINY = GdnSpec(16, 48, 128, 128, 4), GdnSpec(1, 2, 32, 32, 4)
ROWS = ((1, 512), (1, 2048), (8, 256), (64, 33))  # the last: the shortest that go in chunks
TINY_ROWS = ((1, 70), (2, 33))
DEPTH = 3
CHUNK = gdn_chunks.CHUNK.value


def step(num_rows: int, fed: int, device: torch.device) -> Any:
    """Rows that begin, and keep no state."""
    numbers = {"row_starts": 0, "row_fed": fed, "row_committed": fed, "row_replay": 0}
    rows = {name: torch.full((num_rows,), number) for name, number in numbers.items()}
    rows["row_slots"] = torch.arange(num_rows)
    rows["row_offsets"] = torch.arange(num_rows) * fed
    rows["keep_positions"], rows["keep_states"] = torch.full((2, num_rows * MAX_KEEPS), -1)
    on_device = {name: numbers.int().to(device) for name, numbers in rows.items()}
    return SimpleNamespace(num_rows=num_rows, max_keeps=MAX_KEEPS, **on_device)


def inputs(gdn: GdnSpec, num_tokens: int, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As the conv leaves them: keys alike, some heads that forget soon and some that hardly do."""
    entries = num_tokens + num_rows * DEPTH
    q, k = normalize(torch.randn(2, entries, gdn.num_k_heads, gdn.k_dim, device=device) + 0.5, dim=-1)
    v = torch.randn(entries, gdn.num_v_heads * gdn.v_dim, device=device)
    rates = torch.logspace(-3, 0.5, gdn.num_v_heads, device=device)
    decay = -rates * softplus(torch.randn(entries, gdn.num_v_heads, device=device))
    beta = torch.sigmoid(torch.randn(entries, gdn.num_v_heads, device=device))
    return torch.cat([q.flatten(1) * gdn.k_dim**-0.5, k.flatten(1), v], dim=1), torch.stack([decay, beta], dim=1)


def stepped(gdn: GdnSpec, convolved: Tensor, gates: Tensor, num_rows: int, fed: int) -> tuple[Tensor, Tensor]:
    """Outputs [rows, tokens, v heads, v dim] and last states [rows, v heads, k dim, v dim], in float64."""
    convolved, gates = (each[: num_rows * fed].double().unflatten(0, (num_rows, fed)) for each in (convolved, gates))
    key_width = gdn.num_k_heads * gdn.k_dim
    q, k, v = convolved.split([key_width, key_width, gdn.num_v_heads * gdn.v_dim], dim=2)
    shared = gdn.num_v_heads // gdn.num_k_heads
    q, k = (each.unflatten(2, (-1, gdn.k_dim)).repeat_interleave(shared, dim=2) for each in (q, k))
    v = v.unflatten(2, (-1, gdn.v_dim))
    decay, beta = gates.unbind(2)
    state = v.new_zeros(num_rows, gdn.num_v_heads, gdn.k_dim, gdn.v_dim)
    outputs = torch.empty_like(v)
    for t in range(fed):
        state *= decay[:, t].exp()[..., None, None]
        delta = (v[:, t] - (k[:, t, :, None] @ state).squeeze(2)) * beta[:, t, :, None]
        state += k[:, t, :, :, None] * delta[:, :, None]
        outputs[:, t] = (q[:, t, :, None] @ state).squeeze(2)
    return outputs, state


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def seconds(run: Callable[[], None], device: torch.device) -> float:
    run()
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return replay_seconds(graph)


def report(gdn: GdnSpec, num_rows: int, fed: int, device: torch.device) -> str:
    num_tokens, batch = num_rows * fed, step(num_rows, fed, device)
    convolved, gates = inputs(gdn, num_tokens, num_rows, device)
    out = torch.empty(num_tokens, gdn.num_v_heads * gdn.v_dim, device=device)
    state = torch.empty(num_rows, gdn.num_v_heads, gdn.k_dim, gdn.v_dim, device=device)

    def recur(out: Tensor) -> None:
        gdn_chunks.recur_in_chunks(convolved, gates, out, state, gdn, batch, DEPTH)

    recur(out)
    outputs, states = stepped(gdn, convolved, gates, num_rows, fed)
    off = f"outputs off {error(out.view_as(outputs), outputs):.1e}, states {error(state, states):.1e}"
    in_16_bits = partial(recur, out.bfloat16())
    whole = seconds(in_16_bits, device)
    with patch.object(gdn_chunks, "_across", MagicMock()):
        at_once = seconds(in_16_bits, device)
    each = (whole - at_once) / -(-fed // CHUNK)
    times = f"{whole * 1e6:7.1f} us, at once {at_once * 1e6:6.1f}, a chunk {each * 1e6:5.2f}"
    return f"{num_rows:2} rows of {fed:4}  {times}  {off}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny and not torch.cuda.is_available() else "cuda")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    else:
        quicken()
    for num_rows, fed in TINY_ROWS if options.tiny else ROWS:
        print(report(TINY if options.tiny else GDN, num_rows, fed, device), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
