"""GPUs that the tests' wrappers are told to be on."""

from __future__ import annotations

from slipstream.runners.cuda.kernels.gpus import Gpu

HOPPER = Gpu((9, 0), 227 << 10, 132, has_pdl=True)  # H100, H200
ADA = Gpu((8, 9), 99 << 10, 128, has_pdl=False)  # RTX 4090
GPUS = {
    80: Gpu((8, 0), 163 << 10, 108, has_pdl=False),  # A100
    86: Gpu((8, 6), 99 << 10, 82, has_pdl=False),  # RTX 3090
    89: ADA,
    90: HOPPER,
    120: Gpu((12, 0), 99 << 10, 170, has_pdl=True),  # RTX 5090
}  # by compute capability
