"""How exact the chunked recurrence is: against float64, one token after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from slipstream.load.spec import GdnSpec
from slipstream.runners.cuda.kernels.recurrent.gdn_chunks import recur_in_chunks

GDN = GdnSpec(1, 2, 32, 32, 4)
TOKENS = 200


def stepped(convolved: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, v heads, v dim] and the last state [v heads, k dim, v dim], in float64."""
    q, k, v = convolved.double().split([GDN.k_dim, GDN.k_dim, GDN.num_v_heads * GDN.v_dim], dim=1)
    v = v.unflatten(1, (GDN.num_v_heads, GDN.v_dim))
    decay, beta = gates.double().unbind(1)
    state = torch.zeros(GDN.num_v_heads, GDN.k_dim, GDN.v_dim, dtype=torch.float64)
    outputs = []
    for t in range(TOKENS):
        state = state * decay[t].exp()[:, None, None]
        delta = (v[t] - k[t] @ state) * beta[t][:, None]
        state = state + k[t][:, None] * delta[:, None]
        outputs.append(q[t] @ state)
    return torch.stack(outputs), state


@pytest.mark.each_value
@pytest.mark.parametrize("alike", [0.0, 0.8])  # how much the keys have in common
@pytest.mark.parametrize("forgetting", [0.01, 1.0, 40.0])  # the last: hardly a token survives the next
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-3)])
def test_as_exact_as_steps(
    alike: float, forgetting: float, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    common = torch.randn(2, 1, GDN.k_dim)
    q, k = normalize((1 - alike) * torch.randn(2, TOKENS, GDN.k_dim) + alike * common, dim=-1)
    convolved = torch.cat([q * GDN.k_dim**-0.5, k, torch.randn(TOKENS, GDN.num_v_heads * GDN.v_dim)], dim=1)
    decay = -forgetting * softplus(torch.randn(TOKENS, GDN.num_v_heads))
    gates = torch.stack([decay, torch.sigmoid(torch.randn(TOKENS, GDN.num_v_heads) + 1)], dim=1)
    wanted, wanted_state = stepped(convolved, gates)

    counts = {"row_fed": TOKENS, "row_committed": TOKENS, "row_replay": 0}
    others = {"row_slots": 0, "row_offsets": 0, "row_starts": 0, "keep_positions": -1, "keep_states": 0}
    row = {name: torch.tensor([n], dtype=torch.int32, device=device) for name, n in {**counts, **others}.items()}
    out = torch.empty(TOKENS, GDN.num_v_heads * GDN.v_dim, dtype=dtype, device=device)
    state = torch.empty(1, *wanted_state.shape, device=device)
    batch = SimpleNamespace(num_rows=1, max_keeps=0, **row)
    recur_in_chunks(convolved.to(device), gates.to(device), out, state, GDN, batch, 1)  # type: ignore[arg-type]
    assert error(out.unflatten(1, wanted.shape[1:]), wanted) < tolerance
    assert error(state[0], wanted_state) < 1e-4


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


def test_the_report_runs() -> None:
    """What a GPU will be timed with, on small shapes: on the GPU, or where there is none in the interpreter."""
    script = Path(__file__).parent / "gdn_chunks_report.py"
    paths = os.pathsep.join([str(script.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}  # also what chose the interpreter: tests/conftest.py
    done = subprocess.run(
        [sys.executable, str(script), "--tiny"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = re.findall(r"rows of .* outputs off (\S+), states (\S+)$", done.stdout, re.MULTILINE)
    assert len(errors) == 2
    assert max(float(each) for pair in errors for each in pair) < 1e-4
