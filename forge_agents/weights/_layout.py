"""Where the tensors of one version lie, and which versions there are.

In: names, shapes and dtypes. Out: records that travel through the store. Waits for nothing.

Keys of weights ``W``: ``W.index`` says which versions exist, ``W.slotK.head`` how version K's bytes are laid out,
``W.slotK.rankR.partP`` holds part P of the bytes that rank R packed. The index changes last, so a version exists as a
whole or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGN_BYTES = 64
"""Tensors begin on cache lines."""
PART_BYTES = 1 << 27
"""What travels at once. The store answers between two parts, however large the model is, so that a busy one is told
from a dead one: at the slowest transport, messages at 0.1 GB/s, a part takes 1.3 s."""


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
    def most_parts(self) -> int:
        """Parts of the largest buffer."""
        return max(len(self.parts(rank)) for rank in range(len(self.rank_bytes)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without the gaps between them."""
        return sum(piece.num_bytes for piece in self.pieces.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Which versions exist."""

    versions: tuple[tuple[int, int], ...] = ()
    """(version, slot) in the order of publication: the last one is the latest."""

    def latest(self) -> int | None:
        """The version published last; None before the first."""
        return self.versions[-1][0] if self.versions else None

    def slot_of(self, version: int) -> int | None:
        """Where a version lies; None where it does not exist."""
        return dict(self.versions).get(version)

    def make_room(self, num_slots: int) -> tuple[int, Index]:
        """A slot to write next, and the index without the version that lies there."""
        kept = self.versions[max(0, len(self.versions) - num_slots + 1) :]
        taken = {slot for _, slot in kept}
        slot = next(slot for slot in range(num_slots) if slot not in taken)
        return slot, Index(versions=kept)

    def with_version(self, version: int, slot: int) -> Index:
        """The index once `slot` is written."""
        others = tuple(entry for entry in self.versions if entry[0] != version)
        return Index(versions=(*others, (version, slot)))


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], str, int]], num_ranks: int) -> Layout:
    """Spread tensors over the ranks' buffers, each to the one with the fewest bytes so far.

    Args:
        tensors: (name, shape, dtype, bytes an element) in an order that all ranks share.
        num_ranks: Number of buffers.
    """
    ends = [0] * num_ranks
    pieces = {}
    for name, shape, dtype, item_bytes in tensors:
        rank = ends.index(min(ends))
        num_bytes = math.prod(shape) * item_bytes
        pieces[name] = Piece(rank=rank, offset=ends[rank], shape=shape, dtype=dtype, num_bytes=num_bytes)
        ends[rank] += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(pieces=pieces, rank_bytes=tuple(max(end, 1) for end in ends), part_bytes=PART_BYTES)
