"""Where the tensors of one version lie in the buffers of the ranks that wrote it.

In: nothing. Out: values. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor's place."""

    rank: int
    offset: int
    """Bytes from the start of the rank's buffer."""
    shape: tuple[int, ...]
    dtype: str
    """As in ``torch.bfloat16`` without ``torch.``."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All tensors of one version."""

    pieces: Mapping[str, Piece]
    rank_bytes: tuple[int, ...]
    """Size of each rank's buffer."""
    part_bytes: int
    """Size of each part of a buffer but the last."""

    def parts(self, rank: int) -> list[tuple[int, int]]:
        """Where the parts of a rank's buffer begin and end, in bytes."""
        size = self.rank_bytes[rank]
        return [(start, min(start + self.part_bytes, size)) for start in range(0, size, self.part_bytes)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without the gaps between them."""
        return sum(piece.num_bytes for piece in self.pieces.values())
