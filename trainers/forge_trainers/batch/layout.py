"""Layout of a batch: spreads samples over data-parallel ranks and forward passes, and shares common prefixes.

Samples with the same tokens, as in games with few answers, are computed once. Samples of one group with a common
prefix form a `Block`, and the prefix is computed once. Blocks are spread over rows so that ranks finish together.
Blocks of one row may share an opening as well: a common prefix of several groups, such as instructions. Every rank
computes the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from forge_agents.types import EpisodeBatch

_MAX_LOSS_TOKENS = 8
"""Maximum number of loss tokens per position of samples that are computed once: each keeps a hidden state."""
_MAX_DEPTH = 50
"""Maximum nesting of openings."""
_MIN_SAVING = 1 / 8
"""Minimum saving of an opening, as a fraction of the longest prompt that begins with it: attention to other spans has a
cost, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive positions of a row. The positions attend to all of their prefix, and causally to each other."""

    start: int
    """First position in the row."""
    length: int
    seen: tuple[tuple[int, int], ...] = ()
    """Starts and lengths of the shared positions that precede the span, in the order of its sample."""

    @property
    def before(self) -> int:
        """Number of positions that precede the span."""
        return sum(length for _, length in self.seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Samples with a common prefix, computed together."""

    samples: tuple[int, ...]
    """Indices of the samples in the batch."""
    prefix_length: int
    """Number of tokens of the common prefix. The prefix is laid out once."""
    num_tokens: int
    """Number of positions of the block in a row by itself."""
    openings: tuple[tuple[int, int], ...] = ()
    """Id and number of tokens of each opening of the block, the shorter first. Blocks with the same opening have the
    same id, and a row lays it out once."""
    inside: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each sample, the openings that some samples of the block share beyond the prefix. Empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A forward pass of one rank, with L positions and S loss tokens."""

    token_ids_1L: torch.Tensor
    """int64 [1, L]."""
    positions_1L: torch.Tensor
    """int64 [1, L], the position of each token in its sample, for RoPE."""
    spans: tuple[Span, ...]
    """Attention pattern. The spans tile the L positions."""
    source_S: torch.Tensor
    """int64 [S], the position whose logits predict the loss token. The last position of a prefix may appear several
    times."""
    token_S: torch.Tensor
    """int64 [S], the index of the loss token in ``batch["tokens"]``."""
    num_tokens: int
    """Number of positions without padding."""

    def __post_init__(self) -> None:
        assert sum(span.length for span in self.spans) == self.token_ids_1L.shape[1]


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A rank's row, and the number of head calls that all ranks must make together."""

    row: Row
    num_chunks: int
    """Number of calls of the head. Equal on every rank, because the head contains collectives."""
    part: int = 0
    """Number of the part of the batch that it belongs to, such as the samples of one teacher."""

    def filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's ``token_S`` and ``source_S``, padded with zeros to equal, non-empty chunks."""
        num = self.row.token_S.numel()
        fill = -num % self.num_chunks if num else self.num_chunks
        token_S, source_S = (torch.cat([x, x.new_zeros(fill)]) for x in (self.row.token_S, self.row.source_S))
        return token_S, source_S


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Microbatches of one rank, and the cost of the plan."""

    microbatches: Sequence[Microbatch]
    positions: int
    """Number of positions that all ranks compute."""
    group_positions: int
    """The same number without openings: equal samples and prefixes within groups are shared."""
    waste: float
    """Fraction of positions lost to waiting and padding, in [0, 1)."""


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
        batch: A batch that passes `forge_trainers.batch.packing.check_batch`.
        max_tokens: Maximum number of positions of a row, unless one sample has more.
        chunk_tokens: Maximum number of loss tokens per call of the head.
        share_prefixes: Whether equal samples and common prefixes of a row's samples are laid out once.
        hidden_size: Hidden size of the model. Weighs attention against linear layers.
        ranks: Number of data-parallel ranks.
        rank: The rank whose rows are returned.
        multiple_of: Rows are padded to a multiple of this.
        samples: Indices of the samples to compute, at least one. None: all.
    """
    samples = range(len(batch["samples"]["length"])) if samples is None else samples
    copies = equal_samples(batch, samples) if share_prefixes else None
    samples = list(samples if copies is None else copies)
    lengths_n = batch["samples"]["length"][samples]
    longest = int(lengths_n.max())
    room = max_tokens = max(max_tokens, longest)
    if ranks > 1:  # blocks small enough to be spread evenly
        fair_share = math.ceil(int(lengths_n.sum()) / (2 * ranks))
        room = max(longest, min(room, fair_share))
    blocks = blocks_of(batch, max_tokens=room, share_prefixes=share_prefixes, samples=samples)
    if share_prefixes:
        blocks = with_openings(batch, blocks)
    lengths = [block.num_tokens for block in blocks]
    planned = plan_rows(
        lengths,
        openings=[block.openings for block in blocks],
        max_tokens=max_tokens,
        ranks=ranks,
        attention_cost=1 / (12 * hidden_size),  # scores over linear layers, in multiplications
    )
    microbatches, positions, waited = list[Microbatch](), 0, 0
    for pieces_of_rank in planned:
        rows = [
            build_row(batch, [blocks[i] for i in pieces], copies=copies, multiple_of=multiple_of)
            for pieces in pieces_of_rank
        ]
        num_chunks = max(1, *(math.ceil(row.token_S.numel() / chunk_tokens) for row in rows))
        microbatches.append(Microbatch(row=rows[rank], num_chunks=num_chunks))
        positions += sum(row.num_tokens for row in rows)
        waited += ranks * max(row.token_ids_1L.shape[1] for row in rows)
    waste = 1.0 - positions / waited
    return Layout(microbatches=microbatches, positions=positions, group_positions=sum(lengths), waste=waste)


def equal_samples(batch: EpisodeBatch, samples: Iterable[int]) -> dict[int, list[int]]:
    """Return the samples by the first one with the same tokens, in order. Loss tokens may differ.

    If equal samples have more than `_MAX_LOSS_TOKENS` loss tokens per position, the next one is a first one again.
    """
    ids_T, mask_T = batch["tokens"]["ids"].numpy(), batch["tokens"]["loss_mask"].numpy()
    starts, lengths = (batch["samples"][key].tolist() for key in ("start", "length"))
    result, num_loss = dict[int, list[int]](), Counter[int]()
    newest: dict[bytes, int] = {}
    for i in samples:
        place = slice(starts[i], starts[i] + lengths[i])
        tokens, count = ids_T[place].tobytes(), int(mask_T[place].sum())
        first = newest.get(tokens, i)
        if num_loss[first] + count > _MAX_LOSS_TOKENS * lengths[i]:
            first = i
        newest[tokens] = first
        result.setdefault(first, []).append(i)
        num_loss[first] += count
    return result


def blocks_of(
    batch: EpisodeBatch, *, max_tokens: int, share_prefixes: bool, samples: Sequence[int] | None = None
) -> list[Block]:
    """Form blocks of at most `max_tokens` positions from samples of one group with the same first prompt tokens.

    A prefix ends before the first token in which its samples differ and before the first loss token of any of them. A
    sample starts another block if it shares less than half of the block's shortest prompt, or if the block is full.

    Raises:
        ValueError: A sample is longer than `max_tokens`.
    """
    lengths, groups = (batch["samples"][key].tolist() for key in ("length", "group"))
    samples = range(len(lengths)) if samples is None else samples
    if (longest := max(lengths[i] for i in samples)) > max_tokens:
        raise ValueError(f"a sample of {longest} tokens does not fit max_tokens={max_tokens}. Raise max_tokens")
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
    """Return the shareable tokens of each sample: the tokens before the first loss token, without the last token."""
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


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix."""
    num = min(len(first), len(second))
    differ = first[:num] != second[:num]
    return int(differ.argmax()) if differ.any() else num


def with_openings(batch: EpisodeBatch, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with their openings: common prefixes of different groups, nested, and within a block.

    Samples with common prefixes become neighbors within their block.
    """
    prompts = _prompts(batch)
    starts = [prompts[block.samples[0]][: block.prefix_length or None] for block in blocks]
    order = sorted(range(len(blocks)), key=lambda i: _sortable(starts[i]))
    by_block: list[list[tuple[int, int]]] = [[] for _ in blocks]
    numbers = itertools.count(1)
    for first, last, length in _openings([starts[i] for i in order], 0, len(order)):
        number = next(numbers)
        for i in order[first:last]:
            by_block[i].append((number, length))
    result = []
    for block, openings in zip(blocks, by_block, strict=True):
        sorted_prompts = sorted((prompts[i] for i in block.samples), key=_sortable)
        inside: list[list[tuple[int, int]]] = [[] for _ in sorted_prompts]
        for first, last, length in _openings(sorted_prompts, 0, len(sorted_prompts), block.prefix_length):
            number = next(numbers)
            for i in range(first, last):
                inside[i].append((number, length))
        samples = sorted(block.samples, key=lambda i: _sortable(prompts[i]))
        openings_inside = tuple(map(tuple, inside))
        result.append(replace(block, samples=tuple(samples), openings=tuple(openings), inside=openings_inside))
    return result


def _openings(
    prompts: Sequence[np.ndarray], first: int, last: int, above: int = 0, depth: int = 0
) -> list[tuple[int, int, int]]:
    """Return the nested common prefixes of ``prompts[first:last]``: first, last and number of tokens of each.

    `prompts` are sorted, and `above` is the number of tokens of the enclosing opening.
    """
    if last - first < 2 or depth == _MAX_DEPTH:
        return []
    # the prompts are sorted, so all of them share what the first and the last share
    common, result = _common(prompts[first], prompts[last - 1]), list[tuple[int, int, int]]()
    if (last - first - 1) * (common - above) >= max(1, _MIN_SAVING * max(map(len, prompts[first:last]))):
        result, above = [(first, last, common)], common
    start = first
    for at in range(first + 1, last + 1):  # ranges that continue with the same token
        if at == last or _common(prompts[start], prompts[at]) == common:
            result += _openings(prompts, start, at, above, depth + 1)
            start = at
    return result


def _num_positions(pieces: Iterable[int], lengths: Sequence[int], openings: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Return the number of positions of a row with these pieces. Each opening counts once."""
    laid_out, positions = set[int](), 0
    for i in pieces:
        shared = max((tokens for number, tokens in openings[i] if number in laid_out), default=0)
        positions += lengths[i] - shared
        laid_out.update(number for number, _ in openings[i])
    return positions


def plan_rows(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    openings: Sequence[Sequence[tuple[int, int]]] | None = None,
    ranks: int = 1,
    attention_cost: float = 0.0,
) -> list[list[list[int]]]:
    """Spread pieces, of which `lengths` are the numbers of tokens, over rows of at most `max_tokens` positions.

    Greedy: the longest piece goes first, into the cheapest row with enough room. A single rank prefers a row that has
    the piece's opening, which then needs fewer positions. Rows are assigned to `ranks` in order of cost, so that the
    rows of a microbatch are similar. A piece costs ``length + attention_cost * length**2``. The order of the pieces
    does not change the costs of the rows.

    Returns:
        Indices of pieces by microbatch and rank.

    Raises:
        ValueError: There are no pieces, or one does not fit in a row.
    """
    if not lengths:
        raise ValueError("no pieces to plan. The batch is empty")
    if max(lengths) > max_tokens:
        raise ValueError(f"a piece of {max(lengths)} tokens does not fit max_tokens={max_tokens}. Raise max_tokens")
    openings = [()] * len(lengths) if openings is None else openings
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], tuple(openings[i]), i))

    def cost(row: Sequence[int]) -> float:
        return _num_positions(row, lengths, openings) + attention_cost * sum(lengths[i] ** 2 for i in row)

    min_rows = math.ceil(_num_positions(order, lengths, openings) / max_tokens)
    if not any(openings):
        min_rows = max(min_rows, sum(2 * length > max_tokens for length in lengths))  # no two of these fit in one row
    num_rows = math.ceil(min_rows / ranks) * ranks
    while True:
        filled, left = _fill(order, lengths, openings, num_rows, max_tokens, attention_cost, even=ranks > 1)
        if not left:
            break
        # add half of the missing rows: more rows change the whole filling, and one at a time would take minutes
        num_rows += math.ceil(max(1, _num_positions(left, lengths, openings) // (2 * max_tokens)) / ranks) * ranks
    filled.sort(key=lambda row: (-cost(row), row))
    return [filled[i : i + ranks] for i in range(0, num_rows, ranks)]


def _fill(  # noqa: PLR0917  (of one caller)
    order: Sequence[int], lengths: Sequence[int], openings: Sequence[Sequence[tuple[int, int]]], num_rows: int,
    max_tokens: int, attention_cost: float, *, even: bool,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Return the pieces by row, and those that did not fit. Without `even`, a piece prefers a row with its opening."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    left = []
    rows_with = defaultdict[int, set[int]](set)  # by opening
    load, room = np.zeros(num_rows), np.full(num_rows, max_tokens)
    for piece in order:
        takes = np.full(num_rows, lengths[piece])  # positions that the piece takes in each row
        for number, tokens in openings[piece]:
            sharing = list(rows_with[number])
            takes[sharing] = np.minimum(takes[sharing], lengths[piece] - tokens)
        fits = np.flatnonzero(room >= takes)
        if not fits.size:
            left.append(piece)
            continue
        cost = takes[fits] + load[fits] if even else takes[fits]
        cheapest = fits[cost == cost.min()]
        row = int(cheapest[load[cheapest].argmin()])  # the first of equal ones
        rows[row].append(piece)
        for number, _ in openings[piece]:
            rows_with[number].add(row)
        load[row] += takes[row] + attention_cost * lengths[piece] ** 2
        room[row] -= takes[row]
    return rows, left


_Places: TypeAlias = tuple[tuple[int, int], ...]
"""First position in a row and length of each stretch of a sample, in the order of the sample."""


class _RowDraft:
    """Positions that are laid out so far, in order: their tokens (indices of the batch), RoPE positions and spans."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.spans: list[Span] = []
        self.length = 0

    def add(self, sample_start: int, first: int, last: int, seen: _Places) -> _Places:
        """Append tokens `first` to `last` (exclusive) of a sample, after `seen`. Returns the sample's places so far."""
        self.tokens.append(torch.arange(sample_start + first, sample_start + last))
        self._append(torch.arange(first, last), seen)
        return (*seen, (self.spans[-1].start, last - first))

    def pad(self, multiple_of: int, most: int) -> int:
        """Append spans of at most `most` positions without tokens. Returns the number of these positions."""
        end = max(1, math.ceil(self.length / multiple_of)) * multiple_of
        num_padded = end - self.length
        while self.length < end:
            self._append(torch.arange(min(end - self.length, most)), ())
        return num_padded

    def _append(self, positions: torch.Tensor, seen: _Places) -> None:
        self.positions.append(positions)
        self.spans.append(Span(start=self.length, length=len(positions), seen=seen))
        self.length += len(positions)


def build_row(
    batch: EpisodeBatch,
    blocks: Sequence[Block],
    *,
    copies: Mapping[int, Sequence[int]] | None = None,
    multiple_of: int = 1,
) -> Row:
    """Concatenate blocks into a row, padded with separate spans to a multiple of `multiple_of` positions.

    `copies` has, for a sample of the blocks, all samples with its tokens, whose loss tokens are predicted from the same
    positions. None: only the samples of the blocks. A rank without blocks gets one position without loss tokens,
    because it must take part in the collectives.
    """
    starts, lengths = (batch["samples"][key].tolist() for key in ("start", "length"))
    mask_T = batch["tokens"]["loss_mask"]
    draft, chains = _RowDraft(), _prefix_chains(blocks)
    num_sharers = Counter(number for _, chain in chains for number, _ in chain)
    places: dict[int, _Places] = {}  # by number of a prefix
    empty = torch.zeros(0, dtype=torch.int64)
    sources, targets = [empty], [empty]
    for sample, chain in chains:
        seen: _Places = ()
        end = 0
        for (number, length), (longer, _) in itertools.pairwise((*chain, (0, 0))):
            # if all sharers of a prefix share the next longer one as well, both are laid out at once
            if num_sharers[number] > max(1, num_sharers[longer]):
                if number not in places:
                    places[number] = draft.add(starts[sample], end, length, seen) if length > end else seen
                seen, end = places[number], length
        where = draft.add(starts[sample], end, lengths[sample], seen)
        place_L = torch.cat([torch.arange(start, start + length) for start, length in where])
        for copy in (sample,) if copies is None else copies[sample]:
            loss = mask_T[starts[copy] : starts[copy] + lengths[copy]].nonzero().squeeze(1)
            # the first tokens after a shared prefix are all predicted from its last position
            sources.append(place_L[loss - 1])
            targets.append(starts[copy] + loss)
    num_tokens = draft.length
    # spans of padding are no longer than samples: the model may not support later positions
    padding = torch.zeros(draft.pad(multiple_of, max(lengths, default=1)), dtype=torch.int64)
    ids = batch["tokens"]["ids"][torch.cat([empty, *draft.tokens])]
    return Row(
        token_ids_1L=torch.cat([ids, padding])[None],
        positions_1L=torch.cat(draft.positions)[None],
        spans=tuple(draft.spans),
        source_S=torch.cat(sources),
        token_S=torch.cat(targets),
        num_tokens=num_tokens,
    )


def _prefix_chains(blocks: Sequence[Block]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Return the samples of a row, each with number and length of its shared prefixes, the shorter first.

    Openings have their own numbers, and the prefix of the n-th block has the number -n.
    """
    chains: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for number, block in enumerate(blocks, start=1):
        prefix = ((-number, block.prefix_length),) if block.prefix_length else ()
        inside = block.inside or ((),) * len(block.samples)
        chains += [(i, (*block.openings, *prefix, *inner)) for i, inner in zip(block.samples, inside, strict=True)]
    return chains
