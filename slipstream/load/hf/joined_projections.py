"""Qwen3-Next joins the projections of a recurrent layer: rows of q, k, v and z in turn, key head by key head.

Here they are apart, as Qwen3.5 has them: row after row, so quantised rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from slipstream.load.spec import GdnSpec

QKVZ, BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a joined matrix."""

    source: str  # its name
    widths: tuple[int, ...]  # rows of each kind for a key head
    kinds: tuple[int, ...]  # which of them, one kind after the other
    num_heads: int  # key heads

    @property
    def num_source_rows(self) -> int:
        return self.num_heads * sum(self.widths)

    @property
    def num_rows(self) -> int:
        return self.num_heads * sum(self.widths[kind] for kind in self.kinds)

    def rows(self) -> np.ndarray:
        """int64 [num_rows]"""
        rows = np.arange(self.num_source_rows).reshape(self.num_heads, -1)
        starts = np.cumsum((0, *self.widths))
        return np.concatenate([rows[:, starts[kind] : starts[kind + 1]].ravel() for kind in self.kinds])


def parts_of_joined(names: Iterable[str], gdn: GdnSpec) -> dict[str, Part]:
    """By the name of the part."""
    ratio = gdn.num_v_heads // gdn.num_k_heads
    values = ratio * gdn.v_dim
    qkvz, ba = (gdn.k_dim, gdn.k_dim, values, values), (ratio, ratio)
    found: dict[str, Part] = {}
    for name in names:
        if name.endswith(QKVZ):
            stem = name.removesuffix("qkvz.weight")
            found[f"{stem}qkv.weight"] = Part(name, qkvz, (0, 1, 2), gdn.num_k_heads)
            found[f"{stem}z.weight"] = Part(name, qkvz, (3,), gdn.num_k_heads)
        elif name.endswith(BA):
            stem = name.removesuffix("ba.weight")
            found[f"{stem}b.weight"] = Part(name, ba, (0,), gdn.num_k_heads)
            found[f"{stem}a.weight"] = Part(name, ba, (1,), gdn.num_k_heads)
    return found
