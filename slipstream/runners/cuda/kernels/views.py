"""The part of a step's batch that the attention kernels read."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenPositions(Protocol):
    """The position of each token of the flat batch."""

    @property
    def positions(self) -> Tensor:
        """In the cache. int32 [tokens]; -1 for padding: nothing is read or written for such a token."""
        ...

    @property
    def rope_positions(self) -> Tensor:
        """Of the rotation. int32 [tokens]; ``positions`` itself where they are the same."""
        ...

    @property
    def token_slots(self) -> Tensor:
        """int32 [tokens]; 0 for padding."""
        ...

    @property
    def block_table(self) -> Tensor:
        """int32 [slots, blocks per slot]"""
        ...


class TiledRows(TokenPositions, Protocol):
    """The rows of a batch, divided into tiles of tokens."""

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
        """int32 [rows]; the row's tokens without padding."""
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
        """The maximum of tokens in a tile, a power of two."""
        ...

    @property
    def context_hint(self) -> int:
        """No token of the batch sees more positions than this."""
        ...
