"""What the attention kernels need of a step's batch; the runner's batch offers it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenPlaces(Protocol):
    """Where each token of the flat batch stands."""

    @property
    def positions(self) -> Tensor:
        """int32 [tokens]; -1 for padding: nothing is read or written for such a token."""
        ...

    @property
    def token_slots(self) -> Tensor:
        """int32 [tokens]; 0 for padding."""
        ...

    @property
    def block_table(self) -> Tensor:
        """int32 [slots, blocks per slot]"""
        ...


class TiledRows(TokenPlaces, Protocol):
    """The rows of a batch, cut into tiles of tokens."""

    @property
    def token_rows(self) -> Tensor:
        """int32 [tokens]; the row of each token, 0 for padding."""
        ...

    @property
    def row_slots(self) -> Tensor:
        """int32 [rows]"""
        ...

    @property
    def row_offsets(self) -> Tensor:
        """int32 [rows]; flat index of the row's first token."""
        ...

    @property
    def row_starts(self) -> Tensor:
        """int32 [rows]; position of that token."""
        ...

    @property
    def row_fed(self) -> Tensor:
        """int32 [rows]; how many of the row's tokens count."""
        ...

    @property
    def tile_rows(self) -> Tensor:
        """int32 [tiles]; -1 for a tile that is padding."""
        ...

    @property
    def tile_firsts(self) -> Tensor:
        """int32 [tiles]; first token of the tile within its row."""
        ...

    @property
    def tile_size(self) -> int:
        """Tokens a tile covers at most, a power of two."""
        ...

    @property
    def context_hint(self) -> int:
        """No token of the batch sees more positions than this."""
        ...
