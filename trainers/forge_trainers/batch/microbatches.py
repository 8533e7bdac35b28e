"""What each data-parallel rank computes of a batch, one forward pass after the other.

In: an `EpisodeBatch`. Out: a row per forward pass; every rank comes to the same plan. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge_agents.types import EpisodeBatch
from forge_trainers.batch.layout import Row, blocks_of, build_row, plan_rows


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One rank's row, and what all ranks must do alike."""

    row: Row
    num_chunks: int
    """Calls of the head; equal on every rank, because each takes part in collectives."""

    def filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's ``token_S`` and ``source_S``, zeros added until they split into equal, non-empty chunks."""
        num = self.row.token_S.numel()
        fill = -num % self.num_chunks if num else self.num_chunks
        token_S, source_S = (torch.cat([x, x.new_zeros(fill)]) for x in (self.row.token_S, self.row.source_S))
        return token_S, source_S


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Microbatches of one rank, and what the plan costs all of them."""

    microbatches: Sequence[Microbatch]
    positions: int
    """Computed by all ranks."""
    waste: float
    """Share of positions that ranks wait for, in [0, 1)."""


def lay_out(
    batch: EpisodeBatch,
    *,
    max_tokens: int,
    chunk_tokens: int,
    share_prefixes: bool,
    hidden_size: int,
    ranks: int = 1,
    rank: int = 0,
    multiple_of: int = 1,
) -> Layout:
    """Spread a batch over ranks and forward passes.

    Args:
        batch: Checked.
        max_tokens: Most positions of a row, unless one sample alone has more.
        chunk_tokens: Most loss tokens of one call of the head.
        share_prefixes: Whether siblings' common prompt is laid out once.
        hidden_size: Of the model; weighs attention against linear layers.
        ranks: Data-parallel ranks.
        rank: The one whose rows are wanted.
        multiple_of: Rows are padded to a multiple of this.
    """
    longest = int(batch["samples"]["length"].max())
    room = max_tokens = max(max_tokens, longest)
    if ranks > 1:  # blocks small enough to be spread evenly
        fair_share = math.ceil(batch["tokens"]["ids"].numel() / (2 * ranks))
        room = max(longest, min(room, fair_share))
    blocks = blocks_of(batch, max_tokens=room, share_prefixes=share_prefixes)
    plan = plan_rows(
        [block.num_tokens for block in blocks],
        max_tokens=max_tokens,
        ranks=ranks,
        attention_cost=1 / (12 * hidden_size),  # scores over linear layers, in multiplications
        multiple_of=multiple_of,
    )
    microbatches = []
    for pieces_of_rank in plan.rows:
        rows = [build_row(batch, [blocks[i] for i in pieces], multiple_of=multiple_of) for pieces in pieces_of_rank]
        num_chunks = max(1, *(math.ceil(row.token_S.numel() / chunk_tokens) for row in rows))
        microbatches.append(Microbatch(row=rows[rank], num_chunks=num_chunks))
    return Layout(microbatches=microbatches, positions=sum(block.num_tokens for block in blocks), waste=plan.waste)
