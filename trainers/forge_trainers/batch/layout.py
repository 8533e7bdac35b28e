"""What each data-parallel rank computes of a batch, one forward pass after the other: rows of samples.

In: an `EpisodeBatch`. Out: a `Row` per rank and microbatch; every rank comes to the same plan. Waits for nothing.

Samples of one group that begin alike are computed as one `Block`, their common prefix once; blocks are spread over
rows so that ranks finish together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge_agents.types import EpisodeBatch


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
    samples: Sequence[int] | None = None,
) -> Layout:
    """Spread a batch over ranks and forward passes.

    Args:
        batch: Checked by `forge_trainers.batch.packing.check_batch`.
        max_tokens: Most positions of a row, unless one sample alone has more.
        chunk_tokens: Most loss tokens of one call of the head.
        share_prefixes: Whether siblings' common prompt is laid out once.
        hidden_size: Of the model; weighs attention against linear layers.
        ranks: Data-parallel ranks.
        rank: The one whose rows are wanted.
        multiple_of: Rows are padded to a multiple of this.
        samples: Numbers of those to compute, at least one; None: all.
    """
    samples = range(len(batch["samples"]["length"])) if samples is None else samples
    lengths_n = batch["samples"]["length"][list(samples)]
    longest = int(lengths_n.max())
    room = max_tokens = max(max_tokens, longest)
    if ranks > 1:  # blocks small enough to be spread evenly
        fair_share = math.ceil(int(lengths_n.sum()) / (2 * ranks))
        room = max(longest, min(room, fair_share))
    blocks = blocks_of(batch, max_tokens=room, share_prefixes=share_prefixes, samples=samples)
    planned, waste = plan_rows(
        [block.num_tokens for block in blocks],
        max_tokens=max_tokens,
        ranks=ranks,
        attention_cost=1 / (12 * hidden_size),  # scores over linear layers, in multiplications
        multiple_of=multiple_of,
    )
    microbatches = []
    for pieces_of_rank in planned:
        rows = [build_row(batch, [blocks[i] for i in pieces], multiple_of=multiple_of) for pieces in pieces_of_rank]
        num_chunks = max(1, *(math.ceil(row.token_S.numel() / chunk_tokens) for row in rows))
        microbatches.append(Microbatch(row=rows[rank], num_chunks=num_chunks))
    return Layout(microbatches=microbatches, positions=sum(block.num_tokens for block in blocks), waste=waste)


def blocks_of(
    batch: EpisodeBatch, *, max_tokens: int, share_prefixes: bool, samples: Sequence[int] | None = None
) -> list[Block]:
    """Group samples of one group that begin with the same prompt tokens.

    A prefix ends before the first token in which the sharers differ and before the first loss token of any of them.
    Siblings that share less than half of the shortest one's prompt, and those for which a block has no room, start
    another block.

    Args:
        batch: Checked.
        max_tokens: Largest block.
        share_prefixes: False gives every sample a block of its own.
        samples: Numbers of those that blocks are made of, at least one; None: all.

    Raises:
        ValueError: A sample is longer than `max_tokens`.
    """
    ids_T, mask_T = batch["tokens"]["ids"].numpy(), batch["tokens"]["loss_mask"].numpy()
    starts, lengths, groups = (batch["samples"][key].tolist() for key in ("start", "length", "group"))
    samples = range(len(lengths)) if samples is None else samples
    if (longest := max(lengths[i] for i in samples)) > max_tokens:
        raise ValueError(f"a sample of {longest} tokens does not fit max_tokens={max_tokens}; raise max_tokens")
    prompts = []
    for start, length in zip(starts, lengths, strict=True):
        mask = mask_T[start : start + length]
        num_masked = int(mask.argmax()) if mask.any() else length
        # a sample keeps at least one position of its own
        prompts.append(ids_T[start : start + min(num_masked, length - 1)])
    # equal prompts become neighbours, whatever order the samples came in; big-endian bytes sort as their numbers do
    keys = [prompt.astype(">i8").tobytes() for prompt in prompts]
    order = sorted(samples, key=lambda i: (groups[i], keys[i], lengths[i], i))
    blocks, members, prefix = [], order[:1], prompts[order[0]]

    def block() -> Block:
        shared = len(prefix) if len(members) > 1 else 0
        size = shared + sum(lengths[i] - shared for i in members)
        return Block(samples=tuple(members), prefix_length=shared, num_tokens=size)

    for sample in order[1:]:
        common = 0
        if share_prefixes and groups[sample] == groups[members[0]]:
            num = min(len(prefix), len(prompts[sample]))
            differ = prefix[:num] != prompts[sample][:num]
            common = int(differ.argmax()) if differ.any() else num
        grown = [*members, sample]
        fits = common + sum(lengths[i] - common for i in grown) <= max_tokens
        if common and fits and 2 * common >= min(len(prompts[i]) for i in grown):
            members, prefix = grown, prefix[:common]
        else:
            blocks.append(block())
            members, prefix = [sample], prompts[sample]
    return [*blocks, block()]


def plan_rows(
    lengths: Sequence[int], *, max_tokens: int, ranks: int = 1, attention_cost: float = 0.0, multiple_of: int = 1
) -> tuple[list[list[list[int]]], float]:
    """Spread pieces over rows so that ranks finish together.

    Greedy: longest piece first, into the row that costs least and still has room. Rows are then dealt to ranks in
    order of cost, so that rows of one microbatch are alike. The same lengths in another order give the same row costs.

    Args:
        lengths: Tokens of each piece, >= 1. A piece is never cut.
        max_tokens: Room of a row.
        ranks: Data-parallel ranks.
        attention_cost: Cost of a piece is ``length + attention_cost * length**2``.
        multiple_of: Rows are padded to a multiple of this many positions, which counts as waste.

    Returns:
        Piece numbers by microbatch and rank, every rank in each microbatch; and the share of positions in [0, 1) that
        ranks wait for, because the longest row of a microbatch sets its time.

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
    rows = [filled[i : i + ranks] for i in range(0, num_rows, ranks)]

    def padded(row: Sequence[int]) -> int:
        return math.ceil(max(1, sum(lengths[i] for i in row)) / multiple_of) * multiple_of

    computed = ranks * sum(max(padded(row) for row in microbatch) for microbatch in rows)
    return rows, 1.0 - sum(lengths) / computed


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_rows: int, max_tokens: int
) -> list[list[int]] | None:
    """Pieces by row; None where `num_rows` are too few for this greedy filling."""
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
    empty = torch.zeros(0, dtype=torch.int64)
    sources, targets = [empty], [empty]
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
            seen = {"prefix_start": prefix_start, "prefix_length": prefix_length} if prefix_length else {}
            spans.append(Span(start=at, length=own_length, **seen))
            place = mask_T[start : start + lengths[sample]].nonzero().squeeze(1)  # >= prefix_length and >= 1
            before = place - 1
            # siblings' first own tokens are all predicted from the prefix's last position
            sources.append(torch.where(before < prefix_length, prefix_start + before, at + before - prefix_length))
            targets.append(start + place)
            at += own_length
    ids = [batch["tokens"]["ids"][torch.cat(tokens)]] if tokens else []
    if padding := max(1, math.ceil(at / multiple_of)) * multiple_of - at:
        ids.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        spans.append(Span(start=at, length=padding))
    return Row(
        token_ids_1L=torch.cat(ids)[None],
        positions_1L=torch.cat(positions)[None],
        spans=tuple(spans),
        source_S=torch.cat(sources),
        token_S=torch.cat(targets),
    )
