"""Rows contain every token once, are balanced over ranks, and share common prefixes."""

from __future__ import annotations

import itertools
import math

import pytest
from batch_helpers import sample_of
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainers.batch import layout
from forge_trainers.batch.layout import blocks_of, build_row, equal_samples, lay_out, plan_rows, with_openings
from forge_trainers.batch.packing import Sample, pack
from forge_trainers.learner.plan import LearnerPlan

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
token = st.integers(0, 2)


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    result = []
    for _ in range(draw(st.integers(1, 12))):
        ids = draw(st.lists(token, min_size=2, max_size=12))
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        result.append(sample_of(ids, mask, group=draw(st.integers(0, 2))))
    if not any(any(s.loss_mask) for s in result):
        result.append(sample_of((0, 1), 1))
    return result


@given(lengths, st.integers(1, 4))
def test_every_piece_is_planned_once_and_fits(pieces, ranks):
    rows = plan_rows(pieces, max_tokens=64, ranks=ranks)
    placed = sorted(i for microbatch in rows for row in microbatch for i in row)
    assert placed == list(range(len(pieces)))
    assert all(len(microbatch) == ranks for microbatch in rows)
    assert all(sum(pieces[i] for i in row) <= 64 for microbatch in rows for row in microbatch)
    # greedy filling opens a row only when all others are more than half full
    assert len(rows) * ranks <= 2 * math.ceil(sum(pieces) / 64) + ranks


@given(st.lists(st.integers(1, 64) | st.integers(20, 36), min_size=1, max_size=40))
def test_rows_are_as_few_as_filling_them_greedily_allows(pieces):
    rows = plan_rows(pieces, max_tokens=64)

    def fits(count: int) -> bool:
        loads = [0] * count
        for piece in sorted(pieces, reverse=True):
            if not (roomy := [r for r in range(count) if loads[r] + piece <= 64]):
                return False
            loads[min(roomy, key=lambda r: loads[r])] += piece
        return True

    assert len(rows) == next(count for count in itertools.count(math.ceil(sum(pieces) / 64)) if fits(count))


@pytest.mark.parametrize("share", [0.4, 0.55])
def test_many_long_pieces_are_planned_in_a_few_tries(monkeypatch, share):
    tries = []
    fill = layout._fill
    monkeypatch.setattr(layout, "_fill", lambda *given, **named: tries.append(1) or fill(*given, **named))
    pieces = [int(2048 * share) + n % 50 for n in range(1000)]
    rows = plan_rows(pieces, max_tokens=2048)
    assert len(rows) == {0.4: 500, 0.55: 1000}[share] and len(tries) < 20, "each goes over all pieces"


@given(lengths, st.integers(1, 4))
def test_ranks_differ_by_at_most_one_piece(pieces, ranks):
    rows = plan_rows(pieces, max_tokens=sum(pieces), ranks=ranks)
    assert len(rows) == 1
    loads = [sum(pieces[i] for i in row) for row in rows[0]]
    assert max(loads) - min(loads) <= max(pieces)


@given(lengths, st.integers(1, 4), st.randoms())
def test_the_order_of_pieces_does_not_matter(pieces, ranks, random):
    shuffled = pieces.copy()
    random.shuffle(shuffled)

    def loads(order: list[int]) -> list[list[int]]:
        rows = plan_rows(order, max_tokens=64, ranks=ranks)
        return [[sum(order[i] for i in row) for row in microbatch] for microbatch in rows]

    assert loads(pieces) == loads(shuffled)


def test_a_piece_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="65 tokens does not fit max_tokens=64"):
        plan_rows([65], max_tokens=64)


@settings(max_examples=200)
@given(samples(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_rows_hold_the_batch_exactly(found, share, openings, multiple_of):
    batch = pack(found)
    copies = equal_samples(batch, range(len(found))) if share else None
    blocks = blocks_of(batch, max_tokens=24, share_prefixes=share, samples=None if copies is None else list(copies))
    laid_out = [i for block in blocks for i in block.samples]
    assert sorted(itertools.chain(*([i] if copies is None else copies[i] for i in laid_out))) == [*range(len(found))]
    blocks = with_openings(batch, blocks) if openings else blocks
    row = build_row(batch, blocks, copies=copies, multiple_of=multiple_of)
    ids, positions = row.token_ids_1L[0].tolist(), row.positions_1L[0].tolist()
    assert len(ids) % multiple_of == 0
    # each loss token is predicted once, from a position whose whole past is the sample's own
    assert sorted(row.token_S.tolist()) == batch["tokens"]["loss_mask"].nonzero().squeeze(1).tolist()
    starts, all_ids = batch["samples"]["start"].tolist(), batch["tokens"]["ids"].tolist()
    for source, target in zip(row.source_S.tolist(), row.token_S.tolist(), strict=True):
        start = max(s for s in starts if s <= target)
        span = next(s for s in row.spans if s.start <= source < s.start + s.length)
        past = [i for start, length in span.seen for i in range(start, start + length)]
        past += range(span.start, source + 1)
        assert [ids[i] for i in past] == all_ids[start:target]
        assert [positions[i] for i in past] == list(range(target - start))


def test_padding_uses_only_positions_of_samples():
    batch = pack([sample_of((1,) * length, length - 1, advantage=1.0) for length in (5, 3)])
    row = build_row(batch, blocks_of(batch, max_tokens=24, share_prefixes=False), multiple_of=32)
    positions, spans = row.positions_1L[0].tolist(), row.spans
    assert len(positions) == 32 == sum(span.length for span in spans) and max(positions) == 4
    assert [span.length for span in spans] == [3, 5, 5, 5, 5, 5, 4]
    assert positions[8:] == [*range(5)] * 4 + [*range(4)]


@settings(max_examples=200)
@given(samples(), st.booleans(), st.integers(24, 60), st.integers(1, 3))
def test_rows_have_the_planned_size(found, share, room, ranks):
    batch, longest = pack(found), 0
    options = {"max_tokens": room, "chunk_tokens": 8, "share_prefixes": share, "hidden_size": 8, "ranks": ranks}
    plans = [lay_out(batch, **options, rank=rank) for rank in range(ranks)]  # type: ignore[arg-type]
    rows = [[microbatch.row for microbatch in plan.microbatches] for plan in plans]
    assert len({len(own) for own in rows}) == 1
    lengths = [row.token_ids_1L.shape[1] for own in rows for row in own]
    dead = sum(row.num_tokens == 0 for own in rows for row in own)
    assert sum(lengths) - plans[0].positions == dead  # a rank without blocks computes one position
    assert max(lengths) <= room
    longest = sum(max(row.token_ids_1L.shape[1] for row in together) for together in zip(*rows, strict=True))
    assert plans[0].waste == pytest.approx(1 - plans[0].positions / (ranks * longest))
    assert plans[0].positions <= plans[0].group_positions


def with_prompt(prompt: tuple[int, ...], group: int, answer: int = 7) -> Sample:
    return sample_of((*prompt, answer, answer), 2, group=group)


def test_groups_share_openings():
    told, requested = (1, 2, 3, 4), (5, 6)
    result = [with_prompt((*told, *requested, 1 + group), group, answer) for group in (0, 1) for answer in (8, 9)]
    result += [with_prompt((*told, 9, 9), 2), with_prompt((8, 8, 8), 3)]
    batch = pack(result)
    blocks = with_openings(batch, blocks_of(batch, max_tokens=100, share_prefixes=True))
    assert [[tokens for _, tokens in block.openings] for block in blocks] == [[4, 6], [4, 6], [4], []]
    row = build_row(batch, blocks)
    assert [span.length for span in row.spans] == [4, 2, 1, 2, 2, 1, 2, 2, 4, 5]
    assert row.spans[3].seen == ((0, 4), (4, 2), (6, 1)) and row.spans[8].seen == ((0, 4),)
    # an opening that all sharers continue is not a separate span
    assert [span.length for span in build_row(batch, blocks[:2]).spans] == [6, 1, 2, 2, 1, 2, 2]
    assert [span.length for span in build_row(batch, blocks[2:]).spans] == [8, 5]
    layout = lay_out(batch, max_tokens=100, chunk_tokens=8, share_prefixes=True, hidden_size=8)
    assert layout.positions == 25


def test_equal_samples_are_laid_out_once_with_the_loss_tokens_of_each():
    tokens = (1, 2, 3, 7, 8)
    first, other = sample_of(tokens, 2, group=0), sample_of(tokens, (False, True, False, False, True), group=1)
    batch = pack([first, sample_of((1, 2, 3, 7), 1, group=0), other])
    layout = lay_out(batch, max_tokens=100, chunk_tokens=8, share_prefixes=True, hidden_size=8)
    (microbatch,) = layout.microbatches
    row = microbatch.row
    assert layout.positions == 5 + 4 - 3 and sorted(row.token_S.tolist()) == [3, 4, 8, 10, 13]
    source = dict(zip(row.token_S.tolist(), row.source_S.tolist(), strict=True))
    assert source[4] == source[13] and source[3] == source[8] and row.positions_1L[0, source[10]] == 0
    alone = lay_out(batch, max_tokens=100, chunk_tokens=8, share_prefixes=False, hidden_size=8)
    assert alone.positions == 14


def test_equal_samples_have_a_bounded_number_of_loss_tokens_per_position():
    batch = pack([sample_of((1, 2, 3, 4), 3)] * 40 + [sample_of((1, 2, 3, 5), 1)] * 40)
    copies = equal_samples(batch, range(80))
    assert [len(same) for same in copies.values()] == [10, 10, 10, 10, 32, 8], "at most 32 loss tokens for 4 positions"
    assert list(copies) == [0, 10, 20, 30, 40, 72] and [i for same in copies.values() for i in same] == [*range(80)]


def test_nested_prefixes_are_shared():
    result = [
        with_prompt((1, 2, 3, 4, *question), 0, answer) for question, answer in (((5, 6), 8), ((5, 7), 9), ((9,), 8))
    ]
    batch = pack([*result[::2], result[1]])
    (block,) = with_openings(batch, blocks_of(batch, max_tokens=100, share_prefixes=True))
    assert block.prefix_length == 4 and [[tokens for _, tokens in own] for own in block.inside] == [[5], [5], []]
    row = build_row(batch, [block])
    assert [span.length for span in row.spans] == [4, 1, 3, 3, 3]
    assert [span.seen for span in row.spans[2:]] == [((0, 4), (4, 1)), ((0, 4), (4, 1)), ((0, 4),)]


def test_piece_prefers_the_row_with_its_opening():
    # 40 tokens each, 30 of them shared by every second one: two of a kind take 50
    openings = [[(1 + i % 2, 30)] for i in range(4)]
    rows = plan_rows([40] * 4, max_tokens=50, openings=openings)
    assert [[sorted(row) for row in microbatch] for microbatch in rows] == [[[0, 2]], [[1, 3]]]
    # ranks stay balanced
    rows = plan_rows([40] * 4, max_tokens=100, openings=openings, ranks=2)
    assert [len(row) for row in rows[0]] == [2, 2]
    assert len({len({i % 2 for i in row}) for row in rows[0]}) == 1, "both have as many openings, so equal lengths"


def test_short_openings_are_not_shared():
    result = [with_prompt((1, 2, 3, *(4 + group,) * 40), group) for group in (0, 1)]
    batch = pack(result)
    assert not any(
        block.openings for block in with_openings(batch, blocks_of(batch, max_tokens=100, share_prefixes=True))
    )


@given(st.lists(samples(), min_size=1, max_size=10), st.integers(24, 60), st.sampled_from([1, 2, 3]))
def test_rows_of_compiled_blocks_are_of_few_lengths(batches, room, tp):
    plain, compiled = (
        LearnerPlan(max_tokens_per_microbatch=room, tp=tp, compile=value).row_multiple for value in (False, True)
    )
    assert plain == tp and compiled % tp == 0
    result = set()
    for batch in map(pack, batches):
        layout = lay_out(
            batch, max_tokens=room, chunk_tokens=8, share_prefixes=False, hidden_size=8, multiple_of=compiled
        )
        result |= {microbatch.row.token_ids_1L.shape[1] for microbatch in layout.microbatches}
    assert len(result) <= 8 and max(result) < room + compiled


def test_episodes_of_a_group_share_their_prompt():
    rows = (((1, 2, 3, 4, 5), 0), ((1, 2, 3, 4, 6, 7), 0), ((1, 2, 3, 4, 8), 1))
    batch = pack([sample_of(ids, len(ids) - 4, group=group) for ids, group in rows])
    shared = blocks_of(batch, max_tokens=100, share_prefixes=True)
    assert sorted((block.prefix_length, block.num_tokens) for block in shared) == [(0, 5), (4, 7)]
    alone = blocks_of(batch, max_tokens=100, share_prefixes=False)
    assert sorted((block.prefix_length, block.num_tokens) for block in alone) == [(0, 5), (0, 5), (0, 6)]


def test_prefixes_end_before_the_first_token_in_the_loss():
    twins = [sample_of((1, 2, 3, 4), (False, True, False, True))] * 2
    (block,) = blocks_of(pack(twins), max_tokens=100, share_prefixes=True)
    assert block.prefix_length == 1


def test_rank_without_blocks_gets_one_padding_position():
    row = build_row(pack([sample_of((0, 1), 1)]), [])
    assert row.token_ids_1L.shape == (1, 1)
    assert row.token_S.numel() == 0
