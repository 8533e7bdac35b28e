"""What each data-parallel rank computes of a batch, one forward pass after the other: rows of samples.

In: an `EpisodeBatch`. Out: a `Row` per rank and microbatch; every rank comes to the same plan. Waits for nothing.

Samples of one group that begin alike are computed as one `Block`, their common prefix once; blocks are spread over
rows so that ranks finish together. What blocks of one row begin with alike, instructions above all, may be computed
once for all of them: their openings.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forge_agents.types import EpisodeBatch

_DEEPEST = 50
"""Of beginnings within beginnings that openings are looked for in."""
_LEAST_SAVED = 1 / 8
"""Of the longest prompt that begins with an opening: a span that sees others costs more where it is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive positions of a row that see a prefix in full and themselves causally."""

    start: int
    """First position in the row."""
    length: int
    prefix_start: int = 0
    prefix_length: int = 0
    """Positions of the row that come before the span in its sample; 0 where nothing is shared."""
    openings: tuple[tuple[int, int], ...] = ()
    """Starts and lengths of what comes before the prefix in its sample, in that order."""

    @property
    def seen(self) -> tuple[tuple[int, int], ...]:
        """Starts and lengths of all that it sees in full, in its sample's order."""
        return (*self.openings, (self.prefix_start, self.prefix_length)) if self.prefix_length else ()

    @property
    def before(self) -> int:
        """Positions that it sees in full."""
        return sum(length for _, length in self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Samples that share their first tokens; computed together."""

    samples: tuple[int, ...]
    """Sample numbers in the batch."""
    prefix_length: int
    """Tokens that all of them begin with and that are laid out once."""
    num_tokens: int
    """Positions the block takes in a row by itself."""
    openings: tuple[tuple[int, int], ...] = ()
    """Of its prefix or only sample, the shorter first: a number that all blocks with this opening have, and its tokens.
    A row has them once for all its blocks of that number."""
    inside: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Of each sample, what it and others of the block begin with beyond the prefix, as `openings`. Empty: nothing."""


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
    num_tokens: int
    """Positions that are no padding."""

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
    group_positions: int
    """As many as they would be if only siblings shared their prompts."""
    waste: float
    """Share of positions that ranks wait for, in [0, 1)."""


def lay_out(
    batch: EpisodeBatch,
    *,
    max_tokens: int,
    chunk_tokens: int,
    share_prefixes: bool,
    hidden_size: int,
    share_openings: bool = False,
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
        share_openings: Whether a row has what its blocks begin with alike once, whatever their groups.
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
    if share_openings:
        blocks = with_openings(batch, blocks)
    lengths, openings = [block.num_tokens for block in blocks], [block.openings for block in blocks]
    planned, _ = plan_rows(
        lengths,
        openings=openings,
        max_tokens=max_tokens,
        ranks=ranks,
        attention_cost=1 / (12 * hidden_size),  # scores over linear layers, in multiplications
        multiple_of=multiple_of,
    )
    microbatches, positions, waited = list[Microbatch](), 0, 0
    for pieces_of_rank in planned:
        rows = [build_row(batch, [blocks[i] for i in pieces], multiple_of=multiple_of) for pieces in pieces_of_rank]
        num_chunks = max(1, *(math.ceil(row.token_S.numel() / chunk_tokens) for row in rows))
        microbatches.append(Microbatch(row=rows[rank], num_chunks=num_chunks))
        positions += sum(row.num_tokens for row in rows)
        waited += ranks * max(row.token_ids_1L.shape[1] for row in rows)
    waste = 1.0 - positions / waited
    return Layout(microbatches=microbatches, positions=positions, group_positions=sum(lengths), waste=waste)


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
    lengths, groups = (batch["samples"][key].tolist() for key in ("length", "group"))
    samples = range(len(lengths)) if samples is None else samples
    if (longest := max(lengths[i] for i in samples)) > max_tokens:
        raise ValueError(f"a sample of {longest} tokens does not fit max_tokens={max_tokens}; raise max_tokens")
    prompts = _prompts(batch)
    # equal prompts become neighbours, whatever order the samples came in
    keys = [_sortable(prompt) for prompt in prompts]
    order = sorted(samples, key=lambda i: (groups[i], keys[i], lengths[i], i))
    blocks, members, prefix = [], order[:1], prompts[order[0]]

    def block() -> Block:
        shared = len(prefix) if len(members) > 1 else 0
        size = shared + sum(lengths[i] - shared for i in members)
        return Block(samples=tuple(members), prefix_length=shared, num_tokens=size)

    for sample in order[1:]:
        common = 0
        if share_prefixes and groups[sample] == groups[members[0]]:
            common = _common(prefix, prompts[sample])
        grown = [*members, sample]
        fits = common + sum(lengths[i] - common for i in grown) <= max_tokens
        if common and fits and 2 * common >= min(len(prompts[i]) for i in grown):
            members, prefix = grown, prefix[:common]
        else:
            blocks.append(block())
            members, prefix = [sample], prompts[sample]
    return [*blocks, block()]


def _prompts(batch: EpisodeBatch) -> list[np.ndarray]:
    """What may be shared of each sample: its tokens before the first that is in the loss, and not its last one."""
    ids_T, mask_T = batch["tokens"]["ids"].numpy(), batch["tokens"]["loss_mask"].numpy()
    prompts = []
    for start, length in zip(*(batch["samples"][key].tolist() for key in ("start", "length")), strict=True):
        mask = mask_T[start : start + length]
        num_masked = int(mask.argmax()) if mask.any() else length
        # a sample keeps at least one position of its own
        prompts.append(ids_T[start : start + min(num_masked, length - 1)])
    return prompts


def _sortable(prompt: np.ndarray) -> bytes:
    return prompt.astype(">i8").tobytes()  # big-endian bytes sort as their numbers do


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    num = min(len(one), len(other))
    differ = one[:num] != other[:num]
    return int(differ.argmax()) if differ.any() else num


def with_openings(batch: EpisodeBatch, blocks: Sequence[Block]) -> list[Block]:
    """Find what blocks of any groups begin with alike, what some of those do, and what samples of one block do.

    Args:
        batch: The batch that the blocks point into.
        blocks: As `blocks_of` makes them.

    Returns:
        The same blocks in the same order, each with its openings, samples that begin alike side by side.
    """
    prompts = _prompts(batch)
    begins = [prompts[block.samples[0]][: block.prefix_length or None] for block in blocks]
    order = sorted(range(len(blocks)), key=lambda i: _sortable(begins[i]))
    found: list[list[tuple[int, int]]] = [[] for _ in blocks]
    numbers = itertools.count(1)
    for first, last, length in _openings([begins[i] for i in order], 0, len(order)):
        number = next(numbers)
        for i in order[first:last]:
            found[i].append((number, length))
    made = []
    for block, openings in zip(blocks, found, strict=True):
        own = sorted((prompts[i] for i in block.samples), key=_sortable)
        inside: list[list[tuple[int, int]]] = [[] for _ in own]
        for first, last, length in _openings(own, 0, len(own), block.prefix_length):
            number = next(numbers)
            for i in range(first, last):
                inside[i].append((number, length))
        samples = sorted(block.samples, key=lambda i: _sortable(prompts[i]))
        made.append(replace(block, samples=tuple(samples), openings=tuple(openings), inside=tuple(map(tuple, inside))))
    return made


def _openings(
    begins: Sequence[np.ndarray], first: int, last: int, above: int = 0, depth: int = 0
) -> list[tuple[int, int, int]]:
    """What those from `first` to before `last` begin with, then what some of them do: first, last and tokens of each.

    Args:
        begins: Sorted.
        above: Tokens that an opening of all of them has already.
        depth: Of this call within itself.
    """
    if last - first < 2 or depth == _DEEPEST:
        return []
    common, found = _common(begins[first], begins[last - 1]), list[tuple[int, int, int]]()  # all between begin so, too
    if (last - first - 1) * (common - above) >= max(1, _LEAST_SAVED * max(map(len, begins[first:last]))):
        found, above = [(first, last, common)], common
    start = first
    for at in range(first + 1, last + 1):  # those that go on with the same token
        if at == last or _common(begins[start], begins[at]) == common:
            found += _openings(begins, start, at, above, depth + 1)
            start = at
    return found


def _taken(pieces: Iterable[int], lengths: Sequence[int], openings: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Positions of a row of these pieces: what an opening adds to the one above it counts once."""
    held, positions = set[int](), 0
    for i in pieces:
        positions += lengths[i] - _held(openings[i], held)
        held.update(number for number, _ in openings[i])
    return positions


def _held(openings: Sequence[tuple[int, int]], held: Collection[int]) -> int:
    """Tokens of the longest opening that is there already."""
    return max((tokens for number, tokens in openings if number in held), default=0)


def plan_rows(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    openings: Sequence[Sequence[tuple[int, int]]] | None = None,
    ranks: int = 1,
    attention_cost: float = 0.0,
    multiple_of: int = 1,
) -> tuple[list[list[list[int]]], float]:
    """Spread pieces over rows so that ranks finish together.

    Greedy: longest piece first, into the row that costs least and still has room; one rank by itself looks first for
    one that has the piece's opening. Rows are then dealt to ranks in
    order of cost, so that rows of one microbatch are alike. The same lengths in another order give the same row costs.

    Args:
        lengths: Tokens of each piece, >= 1. A piece is never cut.
        max_tokens: Room of a row.
        openings: Of each piece, as `Block.openings`: it takes so many tokens fewer in a row that has another with the
            longest of those numbers. None: pieces have nothing in common.
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
    of = [()] * len(lengths) if openings is None else openings
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], tuple(of[i]), i))

    def cost(row: Sequence[int]) -> float:
        return _taken(row, lengths, of) + attention_cost * sum(lengths[i] ** 2 for i in row)

    least = math.ceil(_taken(order, lengths, of) / max_tokens)
    if not any(of):
        least = max(least, sum(2 * length > max_tokens for length in lengths))  # no two of which share a row
    num_rows = math.ceil(least / ranks) * ranks
    while True:
        filled, left = _fill(order, lengths, of, num_rows, max_tokens, attention_cost, even=ranks > 1)
        if not left:
            break
        # by half of what they would fill: with more rows others lie elsewhere, and one at a time takes minutes of many
        num_rows += math.ceil(max(1, _taken(left, lengths, of) // (2 * max_tokens)) / ranks) * ranks
    filled.sort(key=lambda row: (-cost(row), row))
    rows = [filled[i : i + ranks] for i in range(0, num_rows, ranks)]

    def padded(row: Sequence[int]) -> int:
        return math.ceil(max(1, _taken(row, lengths, of)) / multiple_of) * multiple_of

    computed = ranks * sum(max(padded(row) for row in microbatch) for microbatch in rows)
    return rows, 1.0 - sum(_taken(row, lengths, of) for row in filled) / computed


def _fill(  # noqa: PLR0917  (of one caller)
    order: Sequence[int], lengths: Sequence[int], openings: Sequence[Sequence[tuple[int, int]]], num_rows: int,
    max_tokens: int, attention_cost: float, *, even: bool,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Pieces by row, and those for which `num_rows` are too few for this greedy filling.

    Where rows need not be `even`, since nobody waits for the longest, a piece goes first to where its opening is.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    left = []
    homes = defaultdict[int, set[int]](set)  # rows by opening
    load, room = np.zeros(num_rows), np.full(num_rows, max_tokens)
    for piece in order:
        takes = np.full(num_rows, lengths[piece])
        for number, tokens in openings[piece]:
            there = list(homes[number])
            takes[there] = np.minimum(takes[there], lengths[piece] - tokens)
        fits = np.flatnonzero(room >= takes)
        if not fits.size:
            left.append(piece)
            continue
        cost = takes[fits] + load[fits] if even else takes[fits]
        cheapest = fits[cost == cost.min()]
        row = int(cheapest[load[cheapest].argmin()])  # of the same, the first
        rows[row].append(piece)
        for number, _ in openings[piece]:
            homes[number].add(row)
        load[row] += takes[row] + attention_cost * lengths[piece] ** 2
        room[row] -= takes[row]
    return rows, left


def build_row(batch: EpisodeBatch, blocks: Sequence[Block], *, multiple_of: int = 1) -> Row:
    """Lay blocks out one after the other.

    A rank without blocks gets one position without loss tokens, because it must take part in the collectives.

    Args:
        batch: The batch that the blocks point into.
        blocks: What to compute; may be empty.
        multiple_of: The row is padded to a multiple of this many positions with spans of their own.
    """
    starts, lengths = (batch["samples"][key].tolist() for key in ("start", "length"))
    mask_T = batch["tokens"]["loss_mask"]
    tokens: list[torch.Tensor] = []  # places in batch["tokens"], in row order
    positions: list[torch.Tensor] = []
    empty = torch.zeros(0, dtype=torch.int64)
    sources, targets = [empty], [empty]
    spans: list[Span] = []
    at = 0

    def lay(sample: int, first: int, last: int, seen: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Put these tokens of a sample next into the row. Returns where all of it is up to them."""
        nonlocal at
        tokens.append(torch.arange(starts[sample] + first, starts[sample] + last))
        positions.append(torch.arange(first, last))
        *openings, (start, length) = seen or ((0, 0),)
        spans.append(
            Span(start=at, length=last - first, prefix_start=start, prefix_length=length, openings=tuple(openings))
        )
        at += last - first
        return (*seen, (at - last + first, last - first))

    chains: list[tuple[int, tuple[tuple[int, int], ...]]] = []  # samples, and what others begin with, too
    for number, block in enumerate(blocks, start=1):
        prefix = ((-number, block.prefix_length),) if block.prefix_length else ()
        inside = block.inside or ((),) * len(block.samples)
        chains += [(i, (*block.openings, *prefix, *own)) for i, own in zip(block.samples, inside, strict=True)]
    sharers = Counter(number for _, chain in chains for number, _ in chain)
    laid: dict[int, tuple[tuple[int, int], ...]] = {}
    for sample, chain in chains:
        seen, end = tuple[tuple[int, int], ...](), 0
        for (number, length), (after, _) in itertools.pairwise((*chain, (0, 0))):
            if sharers[number] > max(1, sharers[after]):  # else all of the row that begin so go on with the next, too
                if number not in laid:
                    laid[number] = lay(sample, end, length, seen) if length > end else seen
                seen, end = laid[number], length
        where = lay(sample, end, lengths[sample], seen)
        place_L = torch.cat([torch.arange(start, start + length) for start, length in where])
        loss = mask_T[starts[sample] : starts[sample] + lengths[sample]].nonzero().squeeze(1)  # >= 1, and own
        # siblings' first own tokens are all predicted from the last position that they share
        sources.append(place_L[loss - 1])
        targets.append(starts[sample] + loss)
    ids = [batch["tokens"]["ids"][torch.cat(tokens)]] if tokens else []
    end, most = max(1, math.ceil(at / multiple_of)) * multiple_of, max(lengths, default=1)
    for start in range(at, end, most):  # spans no longer than samples: a model may know no later positions
        padding = min(end - start, most)
        ids.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        spans.append(Span(start=start, length=padding))
    return Row(
        token_ids_1L=torch.cat(ids)[None],
        positions_1L=torch.cat(positions)[None],
        spans=tuple(spans),
        source_S=torch.cat(sources),
        token_S=torch.cat(targets),
        num_tokens=at,
    )
