"""One step's rows and tokens as the kernels see them: device tensors of padded sizes, so that a graph can be replayed.

The host knows the rows and an upper bound of their tokens, which fixes the sizes; only the device knows how many tokens
count and from which position, so these lie in the tensors. Padding is skipped inside the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    num_rows: int  # R, padded
    num_tokens: int  # T, padded
    tokens: Tensor  # int32 [T]; 0 for padding
    positions: Tensor  # int32 [T]: in the cache; -1 for padding: nothing is read or written for such a token
    rope_positions: Tensor  # int32 [T]: of the rotation; for text the same tensor
    token_slots: Tensor  # int32 [T]; 0 for padding
    token_rows: Tensor  # int32 [T]; 0 for padding
    row_slots: Tensor  # int32 [R]; 0 for padding
    row_offsets: Tensor  # int32 [R]: flat index of the row's first token
    row_starts: Tensor  # int32 [R]: its position, the row's cursor
    row_fed: Tensor  # int32 [R]: tokens that count; 0 for padding
    row_committed: Tensor  # int32 [R]: of those, known ones; the rest are drafts
    row_replay: Tensor  # int32 [R]: committed tokens that the row's recurrent states do not have yet
    max_replay: int  # no row has more
    row_stores: Tensor  # int32 [R]: 1 if its states are stored in this step, after its committed tokens; 0: deferred
    max_deferred: int  # tokens that states may lack after a step without drafts; 0: all rows store
    keep_positions: Tensor  # int32 [R * max keeps]: at these positions the row's recurrent state is kept; -1: padding
    keep_states: Tensor  # int32 [R * max keeps]: the state slot of each
    max_keeps: int  # of a row; 0: there are no state slots
    tile_rows: Tensor  # int32 [N]: row of each piece of attention work; -1 for padding
    tile_firsts: Tensor  # int32 [N]: its first token, counted from the row's offset
    tile_size: int  # the maximum of its tokens: a power of two
    block_table: Tensor  # int32 [slots, blocks per slot]
    context_hint: int  # no token lies at this position or beyond
    has_prompts: bool  # rows may be longer than a draft
