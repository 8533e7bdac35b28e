"""Layouts and indices of published versions, and shared pages: what needs no store."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_agents.errors import StallError
from forge_agents.runtime.processes import place
from forge_agents.weights import versions
from forge_agents.weights.versions import ALIGN_BYTES, Index, lay_out

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 4))
def test_tensors_lie_aligned_inside_their_buffers_without_overlap(
    shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    layout = lay_out([(f"t{i}", shape, "bfloat16", 2) for i, shape in enumerate(shapes)], num_ranks)
    assert len(layout.rank_bytes) == num_ranks
    ends = [0] * num_ranks
    for piece in sorted(layout.pieces.values(), key=lambda piece: (piece.offset, piece.num_bytes)):
        assert piece.offset % ALIGN_BYTES == 0
        assert piece.offset >= ends[piece.rank]
        ends[piece.rank] = piece.offset + piece.num_bytes
        assert ends[piece.rank] <= layout.rank_bytes[piece.rank]
    assert layout.num_bytes <= sum(layout.rank_bytes)


def test_ranks_share_the_bytes_evenly() -> None:
    layout = lay_out([(f"t{i}", (100,), "float32", 4) for i in range(10)], 2)
    assert layout.rank_bytes[0] == layout.rank_bytes[1]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(2, 4))
def test_a_ring_keeps_the_last_versions_and_never_writes_over_the_latest(versions: list[int], num_slots: int) -> None:
    index = Index()
    for version in versions:
        before = index.latest()
        slot, during = index.make_room(num_slots)
        assert slot not in {taken for _, taken in during.versions}
        assert 0 <= slot < num_slots
        assert during.latest() == before  # readers still find the last one
        index = during.with_version(version, slot)
        assert index.latest() == version
        assert index.slot_of(version) == slot
        assert len(index.versions) <= num_slots
        assert len({taken for _, taken in index.versions}) == len(index.versions)


def test_a_writer_with_fewer_slots_takes_over() -> None:
    index = Index(versions=((1, 0), (2, 4), (3, 1)))
    slot, during = index.make_room(2)
    assert (slot, during.versions) == (0, ((3, 1),))


def test_shared_pages_are_seen_by_another_process_and_have_no_name() -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import _segments

    segment = _segments.try_create(1024)
    assert segment is not None
    assert str(Path(f"/proc/self/fd/{segment.handle.fd}").readlink()).startswith("/memfd:")  # not in /dev/shm
    bytes_B = segment.tensor()
    bytes_B.fill_(7)
    code = (
        "import sys; from forge_agents.weights._segments import SegmentHandle, open_segment\n"
        f"tensor = open_segment({segment.handle!r}); assert int(tensor.sum()) == 7 * 1024; tensor.fill_(9)"
    )
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
    assert torch.equal(bytes_B, torch.full((1024,), 9, dtype=torch.uint8))


def test_a_closed_segment_is_gone_even_if_its_descriptor_is_used_again() -> None:
    pytest.importorskip("torch")
    from forge_agents.weights import _segments

    segment = _segments.try_create(64)
    assert segment is not None
    handle = segment.handle
    del segment
    with pytest.raises(_segments.SegmentGoneError):
        _segments.open_segment(handle)
    other = _segments.try_create(64)  # takes the descriptor
    assert other is not None
    with pytest.raises(_segments.SegmentGoneError):
        _segments.open_segment(handle)


def test_a_segment_stays_in_its_process_and_its_bytes_may_travel() -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import _segments

    segment = _segments.try_create(64)
    assert segment is not None
    bytes_B = segment.tensor()
    bytes_B.fill_(7)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="send its handle"):
            copied(segment)
    with pytest.raises(TypeError, match="send its handle"):
        pickle.dumps(bytes_B)
    arrived = pickle.loads(pickle.dumps(bytes_B.detach()))
    assert torch.equal(arrived, bytes_B) and _segments.segment_of(arrived) is None


def test_between_places_the_store_sends_bytes_and_no_descriptor() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchstore")
    from forge_agents.weights import _segments, _torchstore

    segment = _segments.try_create(64)
    assert segment is not None
    bytes_B = segment.tensor()
    bytes_B.fill_(7)
    for reader, local in ((place(), True), ("another machine", False)):
        buffer = _torchstore.SharedBuffer()
        buffer.reader_place = reader
        asyncio.run(buffer.write_from(bytes_B))
        assert (buffer.handle is not None) == local
        read = asyncio.run(pickle.loads(pickle.dumps(buffer)).read_into())
        assert torch.equal(read, bytes_B) and (_segments.segment_of(read) is not None) == local


def test_pages_that_cannot_be_had_are_reported_not_touched() -> None:
    pytest.importorskip("torch")
    from forge_agents.weights import _segments

    assert _segments.try_create(1 << 60) is None


class SlowStore:
    """A store elsewhere, and its client: each part that it moves takes a while."""

    name, place, silence_s = "weights", "elsewhere", 0.3

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.part_s = 0.1

    async def client(self) -> SlowStore:
        return self

    async def exists(self, key: str) -> bool:
        return key in self.values

    async def put(self, key: str, value: Any) -> None:
        await asyncio.sleep(self.part_s if "part" in key else 0)
        self.values[key] = value.clone() if "part" in key else value

    async def get(self, key: str) -> Any:
        await asyncio.sleep(self.part_s if "part" in key else 0)
        return self.values[key]


def test_a_transfer_may_take_many_times_the_silence_of_a_dead_store(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    monkeypatch.setattr(versions, "PART_BYTES", 1 << 10)
    sent = {"a": torch.arange(2500, dtype=torch.int16), "b": torch.randn(70)}
    got: dict[str, Any] = {}

    async def main() -> None:
        store: Any = SlowStore()
        publisher, subscriber = Publisher(store, "hero", dtype=torch.float32), Subscriber(store, "hero")
        found = await publisher.publish(sent, 1)
        assert found["put_s"] > 0.5  # six parts
        assert [len(v) for k, v in store.values.items() if "part" in k][:-1] == [1 << 10] * 5
        result = await subscriber.fetch(lambda tensors, _: got.update({n: t.clone() for n, t in tensors.items()}))
        assert result.version == 1 and result.seconds > 0.5
        store.part_s = 60.0
        with pytest.raises(StallError, match=r"weights did not finish put of hero\.slot1\.rank0\.part0 within 0\.3 s"):
            await publisher.publish(sent, 2)
        with pytest.raises(StallError, match=r"weights did not finish get of hero\.slot0\.rank0\.part0"):
            await subscriber.fetch(lambda tensors, version: None)

    asyncio.run(main())
    assert all(torch.equal(got[name], value) for name, value in sent.items())


@pytest.mark.parametrize(
    ("rdma", "several", "said"),
    [
        (False, False, "through shared memory"),
        (False, True, "through shared memory, to other hosts in messages"),
        (True, True, "by TorchStore's own transport, RDMA where there is some (not run by us)"),
    ],
)
def test_the_start_says_how_weights_travel(
    monkeypatch: pytest.MonkeyPatch, rdma: bool, several: bool, said: str
) -> None:
    from forge_agents.weights import _torchstore

    monkeypatch.setattr(_torchstore, "_rdma", rdma, raising=False)
    monkeypatch.setattr(_torchstore, "IS_0_1", True)
    assert _torchstore.transport(several) == said


def test_a_part_of_a_segment_travels_as_its_place() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchstore")
    from forge_agents.weights import _segments, _torchstore

    segment = _segments.try_create(100)
    assert segment is not None
    whole_B = segment.tensor()
    whole_B.copy_(torch.arange(100, dtype=torch.uint8))
    part_B = _segments.part_of(whole_B, 30, 50)
    assert _segments.segment_of(part_B) is segment and part_B.tolist() == list(range(30, 50))
    assert _segments.segment_of(_segments.part_of(torch.zeros(9), 2, 4)) is None
    for reader in (place(), "another machine"):
        buffer = _torchstore.SharedBuffer()
        buffer.reader_place = reader
        asyncio.run(buffer.write_from(part_B))
        message = pickle.dumps(buffer)
        assert asyncio.run(pickle.loads(message).read_into()).tolist() == list(range(30, 50))
    assert buffer.value is not None and buffer.value.untyped_storage().nbytes() == 20  # not the memory around it
