"""Layouts and indices of published versions, shared pages, and how they travel."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_agents.runtime.machine import memory_domain
from forge_agents.weights import _segments
from forge_agents.weights._index import Entry, Index, Process, Write
from forge_agents.weights._layout import ALIGN_BYTES, lay_out

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 4))
def test_tensors_are_aligned_and_do_not_overlap(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out([(f"t{i}", shape, "bfloat16", 2) for i, shape in enumerate(shapes)], num_ranks)
    assert len(layout.rank_bytes) == num_ranks
    ends = [0] * num_ranks
    for piece in sorted(layout.pieces.values(), key=lambda piece: (piece.offset, piece.num_bytes)):
        assert piece.offset % ALIGN_BYTES == 0
        assert piece.offset >= ends[piece.rank]
        ends[piece.rank] = piece.offset + piece.num_bytes
        assert ends[piece.rank] <= layout.rank_bytes[piece.rank]
    assert layout.num_bytes <= sum(layout.rank_bytes)


def test_ranks_share_bytes_evenly() -> None:
    layout = lay_out([(f"t{i}", (100,), "float32", 4) for i in range(10)], 2)
    assert layout.rank_bytes[0] == layout.rank_bytes[1]


# ---- the protocol


def write_of(version: int) -> Write:
    return Write(version=version, writer=Process(place=memory_domain(), pid=os.getpid()))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_index_holds_the_last_version_between_writes(versions: list[int]) -> None:
    index = Index()
    for version in versions:
        before, index = index, index.announce(write_of(version))
        assert index.entry is None and index.retiring == before.entry
        assert before.entry is None or index.is_intact(before.entry)
        index = index.begin_write()
        assert index.entry is index.retiring is None
        assert index.stamp % 2 == 1 and index.stamp > before.stamp
        index = index.commit()
        assert index.write is None and index.stamp % 2 == 0
        assert index.entry == Entry(version=version, stamp=index.stamp)


def test_writer_takes_over_after_another_that_died() -> None:
    entry = Entry(version=3, stamp=6)
    announced = Index(entry=entry, stamp=6).announce(write_of(4))
    assert announced.announce(write_of(4)).is_intact(entry)
    after = announced.begin_write().announce(write_of(4)).begin_write()
    assert (after.entry, after.retiring, after.stamp) == (None, None, 9)


class Pages:
    """The protocol alone, one step of a writer or of a reader at a time. A patient writer waits for leases."""

    def __init__(self, patient: bool) -> None:
        self.index, self.patient = Index(), patient
        self.pages = [0] * 3
        self.published: dict[int, int] = {}
        """Content of a publication, by its stamp."""
        self.leases: set[int] = set()
        self.begun = self.read = self.in_vain = 0

    def write(self) -> Iterator[None]:
        while True:
            self.begun += 1
            number = self.begun
            index = self.index.announce(write_of(number // 3))  # some versions several times
            yield
            self.index = index
            yield
            while self.patient and self.leases:
                yield
            self.index = index = index.begin_write()
            for page in range(3):
                yield
                self.pages[page] = number
            yield
            self.index = index.commit()
            self.published[self.index.stamp] = number

    def look(self, reader: int) -> Iterator[None]:
        while True:
            yield
            self.leases.discard(reader)
            yield
            entry = self.index.entry
            if entry is None:
                continue
            yield
            self.leases.add(reader)
            yield
            if entry != self.index.entry:
                continue
            copied = []
            for page in range(3):
                yield
                copied.append(self.pages[page])
            yield
            if self.index.is_intact(entry):
                assert copied == [self.published[entry.stamp]] * 3
                self.read += 1
            else:
                self.in_vain += 1


@given(st.integers(0), st.booleans())
def test_no_order_of_steps_leads_to_a_torn_read(seed: int, patient: bool) -> None:
    steps = random.Random(seed).choices("wrsk", (30, 10, 10, 1), k=600)
    pages = Pages(patient)
    writer, readers = pages.write(), {"r": pages.look(0), "s": pages.look(1)}
    for step in steps:
        if step == "k":  # the writer is killed wherever it is, and another takes over
            writer = pages.write()
        else:
            next(readers.get(step, writer))
    if patient:
        assert pages.in_vain == 0  # pages that a reader with a lease has begun to read stay as they are


def test_reader_between_two_writes_gets_the_version() -> None:
    pages = Pages(patient=True)
    writer, reader = pages.write(), pages.look(0)
    for process in [writer] * 7 + [reader] * 9:
        next(process)
    assert pages.read == 1


# ---- shared pages


@pytest.fixture
def segment() -> Iterator[_segments.Segment]:
    segment = _segments.try_create(100)
    assert segment is not None
    segment.tensor().copy_(torch.arange(100, dtype=torch.uint8))
    return segment


def test_shared_pages_are_visible_to_other_processes_and_unnamed(segment: _segments.Segment) -> None:
    assert str(Path(f"/proc/self/fd/{segment.handle.fd}").readlink()).startswith("/memfd:")  # not in /dev/shm
    code = (
        "import sys; from forge_agents.weights._segments import SegmentHandle, open_segment\n"
        f"tensor = open_segment({segment.handle!r}); assert int(tensor.sum()) == 99 * 50; tensor.fill_(9)"
    )
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    assert segment.tensor().tolist() == [9] * 100


def test_closed_segment_is_gone_if_its_descriptor_is_reused() -> None:
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


def test_segments_cannot_be_pickled_but_their_bytes_can(segment: _segments.Segment) -> None:
    bytes_B = segment.tensor()
    for copied, value in ((pickle.dumps, segment), (copy.copy, segment), (copy.deepcopy, segment),
                          (pickle.dumps, bytes_B)):  # fmt: skip
        with pytest.raises(TypeError, match="Send its handle"):
            copied(value)
    arrived = pickle.loads(pickle.dumps(bytes_B.detach()))
    assert torch.equal(arrived, bytes_B) and _segments.segment_of(arrived) is None


def test_unavailable_memory_is_reported() -> None:
    assert _segments.try_create(1 << 60) is None


# ---- transport


@pytest.fixture
def torchstore() -> Any:
    pytest.importorskip("torchstore")
    from forge_agents.weights import _torchstore

    return _torchstore


@pytest.mark.parametrize("part", [False, True])
def test_store_sends_bytes_between_hosts(torchstore: Any, segment: _segments.Segment, part: bool) -> None:
    bytes_B = segment.tensor()
    if part:
        bytes_B = _segments.part_of(bytes_B, 30, 50)
        assert _segments.segment_of(bytes_B) is segment
        assert _segments.segment_of(_segments.part_of(torch.zeros(9), 2, 4)) is None
    for reader, local in ((memory_domain(), True), ("another machine", False)):
        buffer = torchstore.SharedBuffer()
        buffer.reader_place = reader
        asyncio.run(buffer.write_from(bytes_B))
        assert (buffer.handle is not None) == local
        read = asyncio.run(pickle.loads(pickle.dumps(buffer)).read_into())
        assert read.tolist() == list(range(30, 50) if part else range(100))
        assert (_segments.segment_of(read) is not None) == local
    assert buffer.value.untyped_storage().nbytes() == bytes_B.numel()  # not the memory around it


def test_transport_is_described(torchstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for rdma, between in ((False, "in messages"), (True, "by RDMA (not run by us)")):
        monkeypatch.setattr(torchstore, "_rdma", rdma)
        assert torchstore.transport(False) == "through shared memory"
        assert torchstore.transport(True) == f"through shared memory, to other hosts {between}"


def test_each_operation_is_one_message(torchstore: Any) -> None:
    messages = []

    class Volume:
        def __getattr__(self, name: str) -> Any:
            async def choose(*args: Any) -> Any:
                messages.append(name)
                return args[1] if name == "get" else ["hero.index"]

            return SimpleNamespace(choose=choose)

    async def use(client: Any) -> None:
        await client.put("hero.index", Index())
        await client.put("hero.data", torch.zeros(3))
        await client.get("hero.index")
        assert await client.keys("hero.") == ["hero.index"]
        await client.delete("hero.index")

    asyncio.run(use(torchstore.Client(Volume(), near=True)))
    assert messages == ["put", "put", "get", "keys", "delete"]


@pytest.mark.parametrize(
    ("rdma", "near", "chosen"),
    [(True, True, "SharedBuffer"), (True, False, "Rdma"), (False, False, "SharedBuffer")],
)
def test_memory_is_shared_within_a_host_despite_rdma(
    torchstore: Any, monkeypatch: pytest.MonkeyPatch, rdma: bool, near: bool, chosen: str
) -> None:
    from torchstore.transport.pipe import Pipe

    class Rdma(torchstore.SharedBuffer):  # type: ignore[misc]
        pass

    sent = []

    async def get(key: str, buffer: Any, request: Any) -> Any:
        sent.append(type(buffer).__name__)
        return buffer

    monkeypatch.setattr(Pipe, "create_transport_buffer", lambda pipe: Rdma())
    monkeypatch.setattr(torchstore, "_rdma", rdma)
    volume = SimpleNamespace(get=SimpleNamespace(choose=get))
    asyncio.run(torchstore.Client(volume, near=near).get("any"))
    assert sent == [chosen]
