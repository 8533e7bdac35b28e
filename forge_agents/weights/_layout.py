"""Where the tensors of a version lie in the buffers of the ranks that wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64
"""Tensors begin on cache lines."""
PART_BYTES = 1 << 27
"""Size of the parts that buffers travel in. The store answers between two parts, so a busy store can be told from a
dead one for models of any size. The slowest transport, Monarch messages at 0.1 GB/s, takes 1.3 s per part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Location of one tensor."""

    rank: int
    offset: int
    """Bytes from the start of the rank's buffer."""
    shape: tuple[int, ...]
    dtype: str
    """Name in `torch`, such as ``bfloat16``."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Locations of all tensors of one version."""

    pieces: Mapping[str, Piece]
    rank_bytes: tuple[int, ...]
    """Size of each rank's buffer."""
    part_bytes: int
    """Size of each part of a buffer except the last."""

    def parts(self, rank: int) -> list[tuple[int, int]]:
        """Start and end of each part of a rank's buffer, in bytes."""
        size = self.rank_bytes[rank]
        return [(start, min(start + self.part_bytes, size)) for start in range(0, size, self.part_bytes)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(piece.num_bytes for piece in self.pieces.values())


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], str, int]], num_ranks: int) -> Layout:
    """Assign each tensor to the rank with the fewest bytes so far.

    Args:
        tensors: (name, shape, dtype, bytes per element), in the same order on all ranks.
        num_ranks: Number of ranks that write.
    """
    ends = [0] * num_ranks
    pieces = {}
    for name, shape, dtype, item_bytes in tensors:
        rank = ends.index(min(ends))
        num_bytes = math.prod(shape) * item_bytes
        pieces[name] = Piece(rank=rank, offset=ends[rank], shape=shape, dtype=dtype, num_bytes=num_bytes)
        ends[rank] += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(pieces=pieces, rank_bytes=tuple(max(end, 1) for end in ends), part_bytes=PART_BYTES)


def view_of(buffer_B: torch.Tensor, piece: Piece) -> torch.Tensor:
    """View of a tensor in its rank's buffer (flat uint8)."""
    dtype = getattr(torch, piece.dtype)
    return buffer_B[piece.offset : piece.offset + piece.num_bytes].view(dtype).view(piece.shape)
