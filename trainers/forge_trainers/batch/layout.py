"""Rows that the model computes: which samples lie where, with common prefixes once, balanced over ranks.

In: an `EpisodeBatch`. Out: `Row`s, one per rank and microbatch. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge_agents.types import EpisodeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Which pieces each rank computes in each microbatch."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """``rows[microbatch][rank]`` lists piece numbers; every rank has the same number of microbatches."""
    waste: float
    """Share of positions in [0, 1) that ranks wait for, because the longest row of a microbatch sets its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive positions of a row that see a prefix in full and themselves causally."""

    start: int
    """First position in the row."""
    length: int
    prefix_start: int = 0
    prefix_length: int = 0
    """Positions of the row that come before the span in its sample; 0 where nothing is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Samples that share their first tokens; computed together."""

    samples: tuple[int, ...]
    """Sample numbers in the batch."""
    prefix_length: int
    """Tokens that all of them begin with and that are laid out once."""
    num_tokens: int
    """Positions the block takes in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forward pass of one rank. L positions, S loss tokens."""

    token_ids_1L: torch.Tensor
    """int64 [1, L]."""
    positions_1L: torch.Tensor
    """int64 [1, L], the place of each token in its sample, for RoPE."""
    spans: tuple[Span, ...]
    """What attends to what; tiles the L positions."""
    source_S: torch.Tensor
    """int64 [S], the position whose logits predict the loss token. A prefix's last position may appear repeatedly."""
    token_S: torch.Tensor
    """int64 [S], the loss token's place in ``batch["tokens"]``."""

    def __post_init__(self) -> None:
        assert sum(span.length for span in self.spans) == self.token_ids_1L.shape[1]


def plan_rows(
    lengths: Sequence[int], *, max_tokens: int, ranks: int = 1, attention_cost: float = 0.0, multiple_of: int = 1
) -> RowPlan:
    """Spread pieces over rows so that ranks finish together.

    Greedy: longest piece first, into the row that costs least and still has room. Rows are then dealt to ranks in
    order of cost, so that rows of one microbatch are alike. The same lengths in another order give the same row costs.

    Args:
        lengths: Tokens of each piece, >= 1. A piece is never cut.
        max_tokens: Room of a row.
        ranks: Data-parallel ranks.
        attention_cost: Cost of a piece is ``length + attention_cost * length**2``.
        multiple_of: Rows are padded to a multiple of this many positions, which counts as waste.

    Raises:
        ValueError: There is no piece, or one does not fit in a row.
    """
    if not lengths:
        raise ValueError("no piece to plan; the batch is empty")
    if max(lengths) > max_tokens:
        raise ValueError(f"a piece of {max(lengths)} tokens does not fit max_tokens={max_tokens}; raise max_tokens")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs = [length + attention_cost * length * length for length in lengths]
    num_rows = math.ceil(math.ceil(sum(lengths) / max_tokens) / ranks) * ranks
    while (filled := _fill(order, lengths, costs, num_rows, max_tokens)) is None:
        num_rows += ranks
    filled.sort(key=lambda row: (-sum(costs[i] for i in row), row))
    rows = tuple(tuple(tuple(row) for row in filled[i : i + ranks]) for i in range(0, num_rows, ranks))

    def padded(row: Sequence[int]) -> int:
        return math.ceil(max(1, sum(lengths[i] for i in row)) / multiple_of) * multiple_of

    computed = ranks * sum(max(padded(row) for row in microbatch) for microbatch in rows)
    return RowPlan(rows=rows, waste=1.0 - sum(lengths) / computed)


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_rows: int, max_tokens: int
) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    load, room = [0.0] * num_rows, [max_tokens] * num_rows
    for piece in order:
        fits = [r for r in range(num_rows) if room[r] >= lengths[piece]]
        if not fits:
            return None
        row = min(fits, key=lambda r: (load[r], r))
        rows[row].append(piece)
        load[row] += costs[piece]
        room[row] -= lengths[piece]
    return rows


def blocks_of(batch: EpisodeBatch, *, max_tokens: int, share_prefixes: bool) -> list[Block]:
    """Group samples of one group that begin with the same prompt tokens.

    A prefix ends before the first token in which the sharers differ and before the first loss token of any of them.
    Siblings that share less than half of the shortest one's prompt, and those for which a block has no room, start
    another block.

    Args:
        batch: Checked by `forge_trainers.batch.packing.check_batch`.
        max_tokens: Largest block.
        share_prefixes: False gives every sample a block of its own.

    Raises:
        ValueError: A sample is longer than `max_tokens`.
    """
    ids = batch["tokens"]["ids"].tolist()
    mask = batch["tokens"]["loss_mask"].tolist()
    starts, lengths, groups = (batch["samples"][key].tolist() for key in ("start", "length", "group"))
    prompts: list[list[int]] = []
    for start, length in zip(starts, lengths, strict=True):
        if length > max_tokens:
            raise ValueError(f"a sample of {length} tokens does not fit max_tokens={max_tokens}; raise max_tokens")
        try:
            num_masked = mask.index(True, start, start + length) - start
        except ValueError:
            num_masked = length
        # a sample keeps at least one position of its own
        prompts.append(ids[start : start + min(num_masked, length - 1)])
    open_blocks: dict[int, tuple[list[int], list[int]]] = {}  # by group: its samples, their common prefix
    blocks: list[Block] = []
    # equal prompts become neighbours, whatever order the samples came in
    for sample in sorted(range(len(starts)), key=lambda i: (groups[i], prompts[i], lengths[i], i)):
        members, prefix = open_blocks.get(groups[sample], ([], []))
        common = _common_prefix(prefix, prompts[sample]) if members and share_prefixes else 0
        shortest = min((len(prompts[i]) for i in (*members, sample)), default=0)
        grown = common + sum(lengths[i] - common for i in (*members, sample))
        if members and common and 2 * common >= shortest and grown <= max_tokens:
            open_blocks[groups[sample]] = ([*members, sample], prefix[:common])
            continue
        if members:
            blocks.append(_block(members, prefix, lengths))
        open_blocks[groups[sample]] = ([sample], prompts[sample])
    blocks += [_block(members, prefix, lengths) for members, prefix in open_blocks.values()]
    return blocks


def _block(members: list[int], prefix: list[int], lengths: Sequence[int]) -> Block:
    shared = len(prefix) if len(members) > 1 else 0
    return Block(
        samples=tuple(members), prefix_length=shared, num_tokens=shared + sum(lengths[i] - shared for i in members)
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


def build_row(batch: EpisodeBatch, blocks: Sequence[Block], *, multiple_of: int = 1) -> Row:
    """Lay blocks out one after the other.

    A rank without blocks gets one position without loss tokens, because it must take part in the collectives.

    Args:
        batch: The batch that the blocks point into.
        blocks: What to compute; may be empty.
        multiple_of: The row is padded to a multiple of this many positions with a span of its own.
    """
    starts, lengths = (batch["samples"][key].tolist() for key in ("start", "length"))
    mask_T = batch["tokens"]["loss_mask"]
    tokens: list[torch.Tensor] = []  # places in batch["tokens"], in row order
    positions: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    spans: list[Span] = []
    at = 0
    for block in blocks:
        prefix_start, prefix_length = at, block.prefix_length
        if prefix_length:
            first = starts[block.samples[0]]
            tokens.append(torch.arange(first, first + prefix_length))
            positions.append(torch.arange(prefix_length))
            spans.append(Span(start=at, length=prefix_length))
            at += prefix_length
        for sample in block.samples:
            start, own_length = starts[sample], lengths[sample] - prefix_length
            tokens.append(torch.arange(start + prefix_length, start + lengths[sample]))
            positions.append(torch.arange(prefix_length, lengths[sample]))
            spans.append(
                Span(start=at, length=own_length, prefix_start=prefix_start, prefix_length=prefix_length)
                if prefix_length
                else Span(start=at, length=own_length)
            )
            place = mask_T[start : start + lengths[sample]].nonzero().squeeze(1)  # >= prefix_length and >= 1
            before = place - 1
            sources.append(torch.where(before < prefix_length, prefix_start + before, at + before - prefix_length))
            targets.append(start + place)
            at += own_length
    ids = [batch["tokens"]["ids"][torch.cat(tokens)]] if tokens else []
    if padding := max(1, math.ceil(at / multiple_of)) * multiple_of - at:
        ids.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        spans.append(Span(start=at, length=padding))
    empty = torch.zeros(0, dtype=torch.int64)
    return Row(
        token_ids_1L=torch.cat(ids)[None],
        positions_1L=torch.cat(positions)[None],
        spans=tuple(spans),
        source_S=torch.cat([empty, *sources]),
        token_S=torch.cat([empty, *targets]),
    )
