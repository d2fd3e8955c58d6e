"""Gated DeltaNet on a ragged batch: causal conv, gated delta rule, replay of accepted drafts from the tape.

Each row's inputs are laid out as [window | replayed + committed | drafts] with all rows' commit points in one column,
so that the committed state and window are stored once. Short rows step token by token, in the same order and precision
whether a token is fed, replayed or drafted; long prefill rows use the chunked form. A row that keeps a state goes in
pieces that end there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.load.spec import GdnSpec
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.batch import RaggedBatch
from slipstream.runners.torch.caches import GdnLayerCache

SEQUENTIAL_LIMIT = 16  # committed tokens a row may have and still be stepped one by one
CHUNK = 64


def gdn_mix(
    conv_in: Tensor,  # [tokens, channels]: raw q, k, v before the conv
    gates: Tensor,  # [tokens, 2, v heads]: log decay and beta, wide
    conv_weight: Tensor,  # [kernel, channels]
    gdn: GdnSpec,
    cache: GdnLayerCache,
    batch: RaggedBatch,
) -> Tensor:
    """The recurrence's output [tokens, v heads * v dim]; commits the state up to each row's last committed token."""
    out = torch.empty(conv_in.shape[0], gdn.num_v_heads * gdn.v_dim, device=conv_in.device, dtype=conv_in.dtype)
    for layout, kept_in in batch.once("gdn_layouts", lambda: _layouts(batch.rows, conv_in.device)):
        _mix_group(layout, conv_in, gates, conv_weight, gdn, cache, out)
        if kept_in is not None:
            cache.copy(*kept_in)
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """A row, or a part of one."""

    slot: int
    offset: int
    num_committed: int
    num_drafts: int
    num_replay: int
    first_replay: int = 0  # on the tape

    @property
    def num_fed(self) -> int:
        return self.num_committed + self.num_drafts


class _Layout:
    """Index lists of a group's tokens in a padded [rows, before + after] grid."""

    def __init__(self, rows: Sequence[_Piece], device: torch.device) -> None:
        self.num_rows = len(rows)
        self.before = max(row.num_replay + row.num_committed for row in rows)
        self.after = max(row.num_drafts for row in rows)
        # Column of each row's first real token.
        first = [self.before - row.num_committed - row.num_replay for row in rows]
        fed = [
            (i, self.before - r.num_committed + j, r.offset + j) for i, r in enumerate(rows) for j in range(r.num_fed)
        ]
        taped = [(i, first[i] + j, r.slot, r.first_replay + j) for i, r in enumerate(rows) for j in range(r.num_replay)]
        ahead = [(r.slot, j, r.offset + r.num_committed + j) for r in rows for j in range(r.num_drafts)]
        self.slots = _upload([row.slot for row in rows], device)
        self.first = _upload(first, device)
        self.fed = _upload(fed, device).reshape(-1, 3).T  # [3, fed]: row, column, flat index
        self.taped = _upload(taped, device).reshape(-1, 4).T  # [4, taped]: row, column, slot, tape index
        self.ahead = _upload(ahead, device).reshape(-1, 3).T  # [3, drafts]: slot, tape index, flat index

    def grid(self, flat: Tensor, tape: Tensor) -> Tensor:
        """[rows, before + after, ...] of fed and replayed values, zero elsewhere."""
        grid = flat.new_zeros(self.num_rows, self.before + self.after, *flat.shape[1:])
        grid[self.taped[0], self.taped[1]] = tape[self.taped[2], self.taped[3]]
        grid[self.fed[0], self.fed[1]] = flat[self.fed[2]]
        return grid


def _upload(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _layouts(rows: tuple[RowSpan, ...], device: torch.device) -> list[tuple[_Layout, tuple[int, int] | None]]:
    """All layers of a step share them: short rows together, each long prefill row by itself, and each piece of a row
    that keeps states: its slot and the state slot follow."""
    whole = [_piece(row, 0, row.num_replay + row.num_committed) for row in rows if not row.kept_states]
    short = [piece for piece in whole if piece.num_committed <= SEQUENTIAL_LIMIT]
    groups = [short] if short else []
    groups += [[piece] for piece in whole if piece.num_committed > SEQUENTIAL_LIMIT]
    layouts: list[tuple[_Layout, tuple[int, int] | None]] = [(_Layout(group, device), None) for group in groups]
    for row in rows:
        first, end = 0, row.num_replay + row.num_committed
        for count, slot in row.kept_states:
            layouts.append((_Layout([_piece(row, first, count)], device), (row.slot, slot)))
            first = count
        if row.kept_states and (first < end or row.num_drafts):
            layouts.append((_Layout([_piece(row, first, end)], device), None))
    return layouts


def _piece(row: RowSpan, first: int, end: int) -> _Piece:
    """Of a row's replayed and committed tokens; the drafts follow the last one."""
    num_replay = max(0, min(end, row.num_replay) - first)
    fed_first, fed_end = max(0, first - row.num_replay), max(0, end - row.num_replay)
    num_drafts = row.num_drafts if end == row.num_replay + row.num_committed else 0
    return _Piece(row.slot, row.offset + fed_first, fed_end - fed_first, num_drafts, num_replay, first)


def _mix_group(
    at: _Layout,
    conv_in: Tensor,
    gates: Tensor,
    conv_weight: Tensor,
    gdn: GdnSpec,
    cache: GdnLayerCache,
    out: Tensor,
) -> None:
    decay, beta = at.grid(gates, cache.tape_gates).unbind(2)  # [rows, columns, v heads]
    q, k, v = _split_heads(_conv(at, conv_in, conv_weight, cache), gdn)
    state = cache.state[at.slots]
    step = _steps if at.num_rows > 1 or at.before <= SEQUENTIAL_LIMIT else _chunks
    mixed, state = step(state, q, k, v, decay, beta, slice(0, at.before))
    cache.state[at.slots] = state
    ahead, _ = _steps(state, q, k, v, decay, beta, slice(at.before, at.before + at.after))
    grid = torch.cat([mixed, ahead], dim=1).flatten(2)
    out[at.fed[2]] = grid[at.fed[0], at.fed[1]].to(out.dtype)
    cache.tape_conv[at.ahead[0], at.ahead[1]] = conv_in[at.ahead[2]]
    cache.tape_gates[at.ahead[0], at.ahead[1]] = gates[at.ahead[2]]


def _conv(at: _Layout, conv_in: Tensor, weight: Tensor, cache: GdnLayerCache) -> Tensor:
    """Causal depthwise conv and SiLU over the grid; commits the window. [rows, columns, channels]"""
    kernel = weight.shape[0]
    grid = at.grid(conv_in, cache.tape_conv)
    padded = torch.cat([grid.new_zeros(grid.shape[0], kernel - 1, grid.shape[2]), grid], dim=1)
    row = torch.arange(grid.shape[0], device=grid.device)
    for j in range(kernel - 1):
        padded[row, at.first + j] = cache.window[at.slots, j]
    cache.window[at.slots] = padded[:, at.before : at.before + kernel - 1]
    columns = grid.shape[1]
    mixed = padded[:, :columns] * weight[0]
    for j in range(1, kernel):
        mixed = mixed + padded[:, j : j + columns] * weight[j]
    return torch.nn.functional.silu(mixed)


def _split_heads(mixed: Tensor, gdn: GdnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [rows, columns, v heads, k dim], normalised; v [rows, columns, v heads, v dim]; all wide."""
    mixed = mixed.to(torch.promote_types(mixed.dtype, torch.float32))
    width = gdn.num_k_heads * gdn.k_dim
    q, k, v = mixed.split([width, width, gdn.num_v_heads * gdn.v_dim], dim=-1)
    q, k = (_unit(x.unflatten(-1, (gdn.num_k_heads, gdn.k_dim))) for x in (q, k))
    group = gdn.num_v_heads // gdn.num_k_heads
    q, k = (_for_values(x, group, gdn.tiled) for x in (q * gdn.k_dim**-0.5, k))
    return q, k, v.unflatten(-1, (gdn.num_v_heads, gdn.v_dim))


def _for_values(keys: Tensor, group: int, tiled: bool) -> Tensor:
    """Key heads as the value heads need them. [rows, columns, k heads, k dim] -> [rows, columns, v heads, k dim]"""
    return keys.repeat(1, 1, group, 1) if tiled else keys.repeat_interleave(group, dim=2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _steps(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, span: slice
) -> tuple[Tensor, Tensor]:
    """One token after the other. A padding column has decay 0 (in log) and beta 0: it leaves the state as it was."""
    outputs = [v[:, span.start : span.start]]
    for t in range(span.start, span.stop):
        state = state * decay[:, t].exp()[..., None, None]
        recalled = (state * k[:, t, :, :, None]).sum(-2)
        delta = (v[:, t] - recalled) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(-2)[:, None])
    return torch.cat(outputs, dim=1), state


def _chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, span: slice
) -> tuple[Tensor, Tensor]:
    """The same recurrence, CHUNK tokens at a time, as matrix products."""
    outputs = []
    for low in range(span.start, span.stop, CHUNK):
        part = slice(low, min(low + CHUNK, span.stop))
        # [rows, v heads, chunk, ...]
        heads = (x[:, part].transpose(1, 2) for x in (q, k, v, decay, beta))
        mixed, state = _chunk(state, *heads)
        outputs.append(mixed.transpose(1, 2))
    return torch.cat(outputs, dim=1), state


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """With G = cumulative log decay: (1 + A) delta = beta (v - e^G k S), A[t,s<t] = beta_t e^(G_t - G_s) k_t.k_s."""
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    fade = total.exp()[..., None]
    lower = (beta[..., None] * between * (k @ k.mT)).tril(-1)
    known = beta[..., None] * (v - fade * (k @ state))
    delta = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    out = fade * (q @ state) + ((q @ k.mT) * between) @ delta
    kept = (total[..., -1:] - total).exp()[..., None]
    return out, fade[..., -1:, :] * state + (k * kept).mT @ delta
