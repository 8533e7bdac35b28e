"""Layouts and indices of published versions, and shared pages: what needs no store."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_agents.errors import ForgeError, StallError, UnknownIdError
from forge_agents.runtime.machine import memory_domain
from forge_agents.weights import _layout
from forge_agents.weights._index import Entry, Index, Process, Write
from forge_agents.weights._layout import ALIGN_BYTES, lay_out
from forge_agents.weights._records import LeaseRecord

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 4))
def test_tensors_are_aligned_and_do_not_overlap(
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


def test_ranks_share_bytes_evenly() -> None:
    layout = lay_out([(f"t{i}", (100,), "float32", 4) for i in range(10)], 2)
    assert layout.rank_bytes[0] == layout.rank_bytes[1]


def write_of(version: int) -> Write:
    return Write(version=version, writer=Process(place=memory_domain(), pid=os.getpid()))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(1, 4))
def test_ring_keeps_the_last_versions(versions: list[int], num_slots: int) -> None:
    index = Index()
    for version in versions:
        before = index
        slot, index = before.announce(num_slots, write_of(version))
        assert all(before.is_intact(entry) == index.is_intact(entry) for entry in before.entries)
        assert slot not in {entry.slot for entry in index.entries}
        assert 0 <= slot < num_slots
        assert index.retiring is None or index.retiring.slot == slot
        index = index.begin_write()
        assert index.latest() == (before.latest() if num_slots > 1 else None)  # several slots still have the last
        assert index.stamp % 2 == 1 and index.stamp > before.stamp
        index = index.commit(slot)
        assert index.versions[-1] == version and index.write is None and index.stamp % 2 == 0
        assert index.of(version) == Entry(version=version, slot=slot, stamp=index.stamp)
        assert len(index.entries) <= num_slots
        assert len({entry.slot for entry in index.entries}) == len(index.entries)


def test_writer_with_fewer_slots_takes_over() -> None:
    entries = tuple(Entry(version=v, slot=s, stamp=2 * v) for v, s in ((1, 0), (2, 4), (3, 1)))
    slot, during = Index(entries=entries, stamp=6).announce(2, write_of(4))
    assert (slot, during.versions, during.retiring, during.begin_write().stamp) == (0, (3,), entries[0], 7)
    again = during.begin_write().announce(2, write_of(4))[1].begin_write()  # of a writer that ended in the middle
    assert (again.versions, again.retiring, again.stamp) == ((3,), None, 9)


class Pages:
    """The protocol alone: one step of a writer or of a reader at a time, in any order.

    Args:
        num_slots: Of the writer.
        patient: Whether it waits for notes.
    """

    def __init__(self, num_slots: int, patient: bool) -> None:
        self.index, self.patient = Index(), patient
        self.slots = [[0] * 3 for _ in range(num_slots)]
        self.published: dict[int, int] = {}
        """What a publication is full of, by its stamp."""
        self.notes: set[int] = set()
        self.begun = self.read = self.in_vain = 0

    def write(self) -> Iterator[None]:
        while True:
            self.begun += 1
            number = self.begun
            slot, index = self.index.announce(len(self.slots), write_of(number // 3))  # some versions again and again
            yield
            self.index = index
            yield
            while self.patient and self.notes:
                yield
            self.index = index = index.begin_write()
            for page in range(3):
                yield
                self.slots[slot][page] = number
            yield
            self.index = index.commit(slot)
            self.published[self.index.stamp] = number

    def look(self, reader: int) -> Iterator[None]:
        while True:
            yield
            self.notes.discard(reader)
            yield
            entry = self.index.latest()
            if entry is None:
                continue
            yield
            self.notes.add(reader)
            yield
            if entry not in self.index.entries:
                continue
            copied = []
            for page in range(3):
                yield
                copied.append(self.slots[entry.slot][page])
            yield
            if self.index.is_intact(entry):
                assert copied == [self.published[entry.stamp]] * 3
                self.read += 1
            else:
                self.in_vain += 1


@given(st.integers(0), st.integers(1, 3), st.booleans())
def test_no_order_of_steps_leads_to_a_torn_read(seed: int, num_slots: int, patient: bool) -> None:
    steps = random.Random(seed).choices("wrsk", (30, 10, 10, 1), k=600)
    pages = Pages(num_slots, patient)
    writer, readers = pages.write(), {"r": pages.look(0), "s": pages.look(1)}
    for step in steps:
        if step == "k":  # the writer is killed wherever it is, and another takes over
            writer = pages.write()
        else:
            next(readers.get(step, writer))
    if patient and num_slots == 1:  # of several slots, a version that is published again leaves the index whole
        assert pages.in_vain == 0  # what a reader with a note has begun to read stays as it is


def test_reader_between_two_writes_gets_the_version() -> None:
    pages = Pages(1, patient=True)
    writer, reader = pages.write(), pages.look(0)
    for who in [writer] * 7 + [reader] * 9:
        next(who)
    assert pages.read == 1


def test_shared_pages_are_visible_to_other_processes_and_unnamed() -> None:
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


def test_closed_segment_is_gone_if_its_descriptor_is_reused() -> None:
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


def test_segments_cannot_be_pickled_but_their_bytes_can() -> None:
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


def test_store_sends_bytes_between_hosts() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchstore")
    from forge_agents.weights import _segments, _torchstore

    segment = _segments.try_create(64)
    assert segment is not None
    bytes_B = segment.tensor()
    bytes_B.fill_(7)
    for reader, local in ((memory_domain(), True), ("another machine", False)):
        buffer = _torchstore.SharedBuffer()
        buffer.reader_place = reader
        asyncio.run(buffer.write_from(bytes_B))
        assert (buffer.handle is not None) == local
        read = asyncio.run(pickle.loads(pickle.dumps(buffer)).read_into())
        assert torch.equal(read, bytes_B) and (_segments.segment_of(read) is not None) == local


def test_unavailable_memory_is_reported() -> None:
    pytest.importorskip("torch")
    from forge_agents.weights import _segments

    assert _segments.try_create(1 << 60) is None


async def read(subscriber: Any, look: Any, *, version: int | None = None) -> Any:
    """Copy a version and show it to `look` once it is known to be whole."""
    start = time.perf_counter()
    async with subscriber.load(version) as weights:
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    look(copies, weights.version)
    return SimpleNamespace(version=weights.version, seconds=time.perf_counter() - start)


async def lend(subscriber: Any, load: Any) -> None:
    """Show `load` the pages themselves, and what checks them from a thread."""
    async with subscriber.load() as weights:
        await load(weights.tensors, weights.version, weights.check)


class SlowStore:
    """A store elsewhere, and its client: each part that it moves takes a while."""

    name, place, heartbeat_timeout_s = "weights", "elsewhere", 0.3

    def __init__(self) -> None:
        self.store_name = f"{os.getpid()}-{id(self)}"
        self.values: dict[str, Any] = {}
        self.put_s = self.get_s = 0.1
        """Of one part."""

    async def client(self) -> SlowStore:
        return self

    async def exists(self, key: str) -> bool:
        return key in self.values

    async def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    async def put(self, key: str, value: Any) -> None:
        await asyncio.sleep(self.put_s if "part" in key else 0)
        self.values[key] = value.clone() if "part" in key else value

    async def get(self, key: str) -> Any:
        await asyncio.sleep(self.get_s if "part" in key else 0)
        return self.values[key]

    async def delete(self, key: str) -> None:
        del self.values[key]


class SharedStore(SlowStore):
    """A store here, which keeps what it is given, and lets others do some steps before it answers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.place, self.heartbeat_timeout_s = memory_domain(), 20.0
        self._random = random.Random(seed)

    async def _rest(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def put(self, key: str, value: Any) -> None:
        await self._rest()
        self.values[key] = value
        await self._rest()

    async def get(self, key: str) -> Any:
        await self._rest()
        return self.values[key]


def test_transfer_may_take_longer_than_the_heartbeat_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 10)
    sent = {"a": torch.arange(2500, dtype=torch.int16), "b": torch.randn(70)}
    got: dict[str, Any] = {}

    async def main() -> None:
        store: Any = SlowStore()
        publisher, subscriber = Publisher(store, "hero", dtype=torch.float32), Subscriber(store, "hero")
        found = await publisher.publish(1, sent)
        assert found["put_s"] > 0.5  # six parts
        assert [len(v) for k, v in store.values.items() if "part" in k][:-1] == [1 << 10] * 5
        result = await read(subscriber, lambda tensors, _: got.update({n: t.clone() for n, t in tensors.items()}))
        assert result.version == 1 and result.seconds > 0.5
        store.put_s, store.get_s = 0.0, 60.0
        await publisher.publish(2, sent)
        with pytest.raises(StallError, match=r"weights did not finish get of hero\.slot0\.rank0\.part0"):
            await read(subscriber, lambda tensors, version: None)
        store.put_s = 60.0
        with pytest.raises(StallError, match=r"did not finish put of hero\.slot0\.rank0\.part0\.\w+ within 0\.3 s"):
            await publisher.publish(3, sent)

    asyncio.run(main())
    assert all(torch.equal(got[name], value) for name, value in sent.items())


@pytest.mark.parametrize("slots", [1, 2])
def test_readers_of_a_busy_writer_get_whole_versions(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 8)
    seen: list[int] = []

    def look(tensors: Any, version: int) -> None:
        assert all(bool((tensor == version).all()) for tensor in tensors.values())
        seen.append(version)

    async def main(store: Any) -> None:
        publisher = Publisher(store, "hero", slots=slots, dtype=torch.float32)

        async def write() -> None:
            for version in range(1000):
                await publisher.publish(version, {f"w{i}": torch.full((40,), float(version)) for i in range(4)})

        async def read_again() -> None:
            subscriber = Subscriber(store, "hero")
            for _ in range(8):
                await read(subscriber, look)
                await asyncio.sleep(0.002)  # the writer goes on

        await publisher.publish(0, {f"w{i}": torch.zeros(40) for i in range(4)})
        writing = asyncio.ensure_future(write())
        await asyncio.gather(read_again(), read_again())
        assert not writing.done()
        writing.cancel()
        assert [key for key in store.values if "lease" in key or "request" in key] == []

    for seed in range(3):
        asyncio.run(main(SharedStore(seed)))
    assert len(seen) == 48 and len(set(seen)) > 1


def test_two_publishers_of_one_name_fail_without_torn_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 8)
    seen, told = list[int](), list[str]()

    def look(tensors: Any, version: int) -> None:
        assert all(bool((tensor == version).all()) for tensor in tensors.values())
        seen.append(version)

    async def main(store: Any) -> None:
        store.heartbeat_timeout_s = 0.05

        async def write(first: int) -> None:
            publisher = Publisher(store, "hero", dtype=torch.float32)
            for version in range(first, 20, 2):
                with contextlib.suppress(ForgeError):
                    await publisher.publish(version, {f"w{i}": torch.full((40,), float(version)) for i in range(4)})
                    continue
                told.append("two")
                await asyncio.sleep(0)

        async def read_again() -> None:
            for _ in range(4):
                with contextlib.suppress(StallError, UnknownIdError):
                    await read(Subscriber(store, "hero"), look)

        await asyncio.gather(write(0), write(1), read_again())

    for seed in range(3):
        asyncio.run(main(SharedStore(seed)))
    assert seen and told


def test_writer_waits_for_a_slow_reader_that_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 10)

    async def main() -> None:
        store: Any = SlowStore()
        store.put_s, store.get_s = 0.0, 0.15  # a fetch of four parts takes twice the silence of a dead reader
        publisher, subscriber = Publisher(store, "hero", dtype=torch.float32), Subscriber(store, "hero")
        last = 0

        async def write(most: int) -> None:
            nonlocal last
            while last < most:
                await publisher.publish(last, {"w": torch.full((1024,), float(last))})
                last += 1
                await asyncio.sleep(0.05)

        await write(1)
        writing = asyncio.ensure_future(write(1000))
        seen: list[Any] = []
        result = await asyncio.wait_for(read(subscriber, lambda tensors, _: seen.append(tensors["w"].clone())), 20)
        assert bool((seen[0] == result.version).all())
        assert last - result.version <= 2
        writing.cancel()
        await subscriber._lease.begin(store, "slot0")  # and does not get on
        started = time.monotonic()
        await write(last + 1)
        assert time.monotonic() - started > store.heartbeat_timeout_s
        assert [key for key in store.values if "lease" in key] == []

    asyncio.run(main())


def test_generated_tensors_are_not_kept() -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    made: list[Any] = []
    most, num_calls, shape = 0, 0, (8,)

    def tensors() -> Iterator[tuple[str, Any]]:
        nonlocal most, num_calls
        num_calls += 1
        for i in range(6):
            tensor = torch.full(shape if i == 5 else (8,), float(i))
            made.append(weakref.ref(tensor))
            yield f"w{i}", tensor
            del tensor
            most = max(most, sum(one() is not None for one in made))

    async def main() -> None:
        nonlocal shape
        store: Any = SlowStore()
        store.put_s = store.get_s = 0.0
        publisher, got = Publisher(store, "hero"), dict[str, float]()
        for version in (1, 2):
            await publisher.publish(version, tensors)
        subscriber = Subscriber(store, "hero")
        await read(subscriber, lambda found, _: got.update({n: float(t[0]) for n, t in found.items()}))
        assert got == {f"w{i}": float(i) for i in range(6)}
        assert (most, num_calls) == (0, 3)  # the first time it is called to see what comes
        shape = (9,)
        with pytest.raises(ValueError, match=r"'w5' of weights 'hero' has the shape \[9\], but had the shape \[8\]"):
            await publisher.publish(3, tensors)
        with pytest.raises(ValueError, match="'hero' lack w0, w1, w2"):
            await publisher.publish(3, list)

    asyncio.run(main())


def test_reader_waits_for_a_version_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    async def main() -> None:
        store: Any = SlowStore()
        publisher = Publisher(store, "hero")
        await publisher.publish(1, {"w": torch.zeros(4)})
        for asked in (None, 3):
            writing = asyncio.ensure_future(publisher.publish(3, {"w": torch.ones(4)}))
            await asyncio.sleep(0.02)
            with pytest.raises(UnknownIdError, match="no version 1; existing versions: none, and 3 is being written"):
                await read(Subscriber(store, "hero"), lambda tensors, version: None, version=1)
            result = await read(Subscriber(store, "hero"), lambda tensors, version: None, version=asked)
            assert result.version == 3 and writing.done()

    asyncio.run(main())


def test_readers_wait_for_a_slow_writer_and_name_a_stalled_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 10)
    taken: list[int] = []

    def slowly() -> Iterator[tuple[str, Any]]:
        for i in range(8):
            time.sleep(pause_s)
            assert i < 6 or free.wait(20)
            yield f"w{i}", torch.full((128,), 2.0)

    async def waits(store: Any, slot_held_s: float = 0.0) -> float:
        """Seconds of a write for which somebody waits from its beginning on."""
        other, reader = Subscriber(store, "hero"), Subscriber(store, "hero")
        if slot_held_s:
            await other._lease.begin(store, "slot0")
        async with other._lease.renewing(store):
            started = time.monotonic()
            writing = asyncio.ensure_future(publisher.publish(2, slowly))
            await asyncio.sleep(0.02)
            reading = asyncio.ensure_future(read(reader, lambda tensors, version: taken.append(version)))
            await asyncio.sleep(slot_held_s)
        await other._lease.release(store)
        await asyncio.gather(writing, reading)
        return time.monotonic() - started

    async def main() -> None:
        nonlocal publisher, pause_s
        store: Any = SlowStore()
        store.put_s, store.get_s, store.heartbeat_timeout_s = (
            0.0,
            0.0,
            0.6,
        )  # twice what is waited for below, for busy machines
        with ThreadPoolExecutor(1) as thread:
            publisher = Publisher(store, "hero", dtype=torch.float32, thread=thread)
            await publisher.publish(1, slowly)
            assert (
                await waits(store, slot_held_s=2 * store.heartbeat_timeout_s) > 2 * store.heartbeat_timeout_s
            )  # before its first byte
            pause_s = 0.2
            assert await waits(store) > 2 * store.heartbeat_timeout_s  # while tensors are made
            pause_s, store.put_s = 0.0, 0.3
            assert await waits(store) > 2 * store.heartbeat_timeout_s  # while parts travel
            assert taken == [2, 2, 2]
            pause_s, store.put_s = 0.02, 0.0
            free.clear()
            writing = asyncio.ensure_future(publisher.publish(3, slowly))
            await asyncio.sleep(store.heartbeat_timeout_s)  # it answers, and makes no more tensors
            started = time.monotonic()
            with pytest.raises(StallError, match=r"process \d+, .* version 3, has made no progress for \d s"):
                await read(Subscriber(store, "hero"), lambda tensors, version: None)
            assert store.heartbeat_timeout_s < time.monotonic() - started < 30  # a busy machine takes its time
            other_rank = Process(place="another rank's", pid=1)
            store.values["hero.progress"] = LeaseRecord(owner=other_rank, renewals=1)
            waiting = asyncio.ensure_future(read(Subscriber(store, "hero"), lambda tensors, version: None))
            for beats in range(2, 8):  # the first rank has done its part, another has not
                await asyncio.sleep(store.heartbeat_timeout_s / 4)
                store.values["hero.progress"] = LeaseRecord(owner=other_rank, renewals=beats)
            assert not waiting.done()
            with pytest.raises(StallError, match="has made no progress for [12345] s"):
                await waiting
            free.set()
            await writing

    publisher: Any = None
    pause_s, free = 0.0, threading.Event()
    free.set()
    asyncio.run(main())


def test_unfinished_version_is_named_and_replaced_by_the_next_writer() -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber

    class Broken(Publisher):
        def _pack(self, *given: Any) -> None:
            raise OSError("out of reach")

    class Second(Publisher):
        def _pack(self, *given: Any) -> None:
            assert not [key for key in self._ref.values if "slot" in key]  # type: ignore[attr-defined]  # freed before
            super()._pack(*given)

    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pid = ended.pid

    async def main() -> None:
        store: Any = SlowStore()
        store.put_s = store.get_s = 0.0
        subscriber, taken = Subscriber(store, "hero"), list[int]()
        await Publisher(store, "hero").publish(1, {"w": torch.zeros(4)})
        with pytest.raises(OSError, match="out of reach"):
            await Broken(store, "hero").publish(2, {"w": torch.ones(4)})
        started = time.monotonic()
        with pytest.raises(StallError, match=r"'hero' have no complete version: .* version 2, has") as seen:
            await read(subscriber, lambda tensors, version: taken.append(version))
        assert seen.value.who == "writer of hero" and re.search(r"has made no progress for \d+ s", str(seen.value))
        assert time.monotonic() - started > store.heartbeat_timeout_s
        left = store.values["hero.index"]
        writer = Process(place=memory_domain(), pid=pid)
        store.values["hero.index"] = Index(stamp=1, write=Write(version=2, writer=writer))
        store.heartbeat_timeout_s = 60.0
        with pytest.raises(StallError, match="ended before it finished"):  # at once
            await read(subscriber, lambda tensors, version: taken.append(version))
        store.values["hero.index"] = left
        await Second(store, "hero").publish(2, {"w": torch.ones(4)})
        await read(subscriber, lambda tensors, version: taken.append(version))

    asyncio.run(main())


def test_version_is_pulled_once_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber, _records, _segments

    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 10)
    got: list[str] = []

    class Counting(SlowStore):
        async def get(self, key: str) -> Any:
            got.extend([key] if "part" in key else [])
            return await super().get(key)

    def on(host: str, store: Any) -> Subscriber:
        with monkeypatch.context() as there:
            there.setattr(_records, "memory_domain", lambda: f"{host} of {os.getpid()}")
            return Subscriber(store, "hero")

    def value(tensors: Any) -> float:
        assert len({float(tensor.view(-1)[0]) for tensor in tensors.values()}) == 1
        return float(tensors["w0"][0])

    async def main() -> None:
        store: Any = Counting()
        store.put_s, store.get_s, store.heartbeat_timeout_s = 0.0, 0.02, 20.0
        publisher = Publisher(store, "hero", dtype=torch.float32)
        readers = {host: [on(host, store) for _ in range(3)] for host in ("a", "b")}
        seen: list[float] = []

        async def load(tensors: Any, arrived: int, check: Any) -> None:
            await asyncio.to_thread(check)
            seen.append(value(tensors))

        for version in (1, 2, 2, 3):
            await publisher.publish(version, {f"w{i}": torch.full((300,), float(version)) for i in range(4)})
            got.clear()
            seen.clear()
            inodes = set[int]()
            await asyncio.gather(*(lend(reader, load) for host in readers.values() for reader in host))
            assert seen == [float(version)] * 6
            assert len(got) == 2 * 5  # five parts, two hosts
            for host in readers.values():
                segments = [_segments.segment_of(reader._host_copy._pages[0]) for reader in host]
                inodes |= {segment.inode for segment in segments if segment is not None}
            assert len(inodes) == 2  # one set of pages a host
            await read(readers["a"][0], lambda tensors, _: seen.append(value(tensors)))
            assert seen[6:] == [version] and len(got) == 2 * 5
        assert [key for key in store.values if "lease" in key] == []
        del readers["a"][0]  # maybe the one that pulled: another offers the pages
        got.clear()
        await asyncio.gather(*(lend(reader, load) for reader in [*readers["a"], on("a", store)]))
        assert len(got) in (0, 5)

    asyncio.run(main())


def test_puller_waits_for_readers_and_a_stalled_puller_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber, _host_copy

    async def main() -> None:
        store: Any = SlowStore()
        store.put_s = store.get_s = 0.0
        store.heartbeat_timeout_s = 20.0
        publisher = Publisher(store, "hero", dtype=torch.float32)
        slow, quick = Subscriber(store, "hero"), Subscriber(store, "hero")
        await publisher.publish(1, {"w": torch.full((300,), 1.0)})
        reads, done = asyncio.Event(), list[str]()

        async def load_slowly(tensors: Any, arrived: int, check: Any) -> None:
            reads.set()
            await asyncio.sleep(0.3)
            assert bool((tensors["w"] == 1.0).all())
            await asyncio.to_thread(check)
            done.append("slow")

        async def load(tensors: Any, arrived: int, check: Any) -> None:
            assert bool((tensors["w"] == 2.0).all())
            done.append("quick")

        reading = asyncio.ensure_future(lend(slow, load_slowly))
        await reads.wait()
        await publisher.publish(2, {"w": torch.full((300,), 2.0)})
        assert not done  # the host has pages of its own: the learner goes on
        await lend(quick, load)
        await reading
        assert done == ["slow", "quick"]
        store.heartbeat_timeout_s = 0.2
        await publisher.publish(3, {"w": torch.full((300,), 3.0)})
        late = Subscriber(store, "hero")
        lock = _host_copy._lock(late._host_copy._lock_name)
        assert lock is not None
        said = f"process {os.getpid()}, which pulls them for all processes here, has made no progress"
        with lock, pytest.raises(StallError, match=said):
            await read(late, lambda tensors, version: None)
        taken: list[int] = []
        await read(late, lambda tensors, version: taken.append(version))
        assert taken == [3]

    asyncio.run(main())


def test_overwritten_pages_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forge_agents.weights import Publisher, Subscriber, _records

    async def idle(lease: Any, client: Any) -> None:
        lease.held = False

    async def main() -> None:
        store: Any = SharedStore(0)
        publisher, subscriber = Publisher(store, "hero", dtype=torch.float32), Subscriber(store, "hero")
        await publisher.publish(1, {"w": torch.full((300,), 1.0)})

        async def load(tensors: Any, arrived: int, check: Any) -> None:
            assert bool((tensors["w"] == 1.0).all())
            await asyncio.to_thread(check)
            await publisher.publish(2, {"w": torch.full((300,), 2.0)})
            assert bool((tensors["w"] == 2.0).all())  # the pages themselves, no copy
            with pytest.raises(StallError, match="'hero' version 1 were overwritten while they were read"):
                await asyncio.to_thread(check)

        with monkeypatch.context() as unheld:
            unheld.setattr(_records.Lease, "renew", idle)
            await lend(subscriber, load)
        assert subscriber._host_copy._pages == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("rdma", "several", "said"),
    [
        (False, False, "through shared memory"),
        (False, True, "through shared memory, to other hosts in messages"),
        (True, False, "through shared memory"),
        (True, True, "through shared memory, to other hosts by RDMA (not run by us)"),
    ],
)
def test_transport_is_described(
    monkeypatch: pytest.MonkeyPatch, rdma: bool, several: bool, said: str
) -> None:
    from forge_agents.weights import _torchstore

    monkeypatch.setattr(_torchstore, "_rdma", rdma, raising=False)
    assert _torchstore.transport(several) == said


def test_memory_is_shared_within_a_host_despite_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchstore")
    from torchstore.transport.pipe import Pipe

    from forge_agents.weights import _torchstore

    class Rdma:
        pass

    class Asking(_torchstore.Client):  # type: ignore[misc, name-defined]
        async def _locate_volumes(self, key: str) -> Any:
            raise KeyError(type(Pipe(None).create_transport_buffer()).__name__)

    monkeypatch.setattr(_torchstore, "_buffer_between", lambda pipe: Rdma())
    client = Asking(controller=None, strategy=None)
    for rdma, near, chosen in ((True, True, "SharedBuffer"), (True, False, "Rdma"), (False, False, "SharedBuffer")):
        monkeypatch.setattr(_torchstore, "_rdma", rdma)
        client.near = near
        with pytest.raises(KeyError, match=chosen):
            asyncio.run(client.get("any"))


def test_part_of_a_segment_is_sent_as_a_range() -> None:
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
    for reader in (memory_domain(), "another machine"):
        buffer = _torchstore.SharedBuffer()
        buffer.reader_place = reader
        asyncio.run(buffer.write_from(part_B))
        message = pickle.dumps(buffer)
        assert asyncio.run(pickle.loads(message).read_into()).tolist() == list(range(30, 50))
    assert buffer.value is not None and buffer.value.untyped_storage().nbytes() == 20  # not the memory around it
