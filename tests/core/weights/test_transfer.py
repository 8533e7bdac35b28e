"""Publishers and subscribers with a store in this process: whole versions, patience, and errors that name the cause."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
import torch

from forge_agents.errors import ForgeError, StallError, UnknownIdError
from forge_agents.runtime.machine import memory_domain
from forge_agents.weights import Publisher, Subscriber, _host_copy, _layout, _records, _segments
from forge_agents.weights._index import Index, Process, Write
from forge_agents.weights._records import LeaseRecord

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layout, "PART_BYTES", 1 << 10)


def full(value: float, num: int = 4, size: int = 160) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((size,), float(value)) for i in range(num)}


def publisher_of(store: Any, **options: Any) -> Publisher:
    return Publisher(store, "hero", dtype=torch.float32, **options)


async def read(subscriber: Subscriber, version: int | None = None) -> Any:
    """Return a copy of a version that is known to be whole."""
    start = time.perf_counter()
    async with subscriber.load(version) as weights:
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    return SimpleNamespace(version=weights.version, tensors=copies, seconds=time.perf_counter() - start)


async def read_whole(store: Any) -> int:
    """Return the version that was read, after a check that all numbers are those of this version."""
    result = await read(Subscriber(store, "hero"))
    assert all(bool((tensor == result.version).all()) for tensor in result.tensors.values())
    return int(result.version)


@contextlib.asynccontextmanager
async def running(work: Any) -> Any:
    task = asyncio.ensure_future(work)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_transfer_may_take_longer_than_the_heartbeat_timeout(slow_store: Any) -> None:
    weights = {"a": torch.arange(2500, dtype=torch.int16), "b": torch.randn(70)}
    publisher, subscriber = publisher_of(slow_store), Subscriber(slow_store, "hero")
    timings = await publisher.publish(1, weights)
    assert timings["put_s"] > 0.5  # six parts
    assert [len(slow_store.values[key]) for key in slow_store.keys_with("part")][:-1] == [1 << 10] * 5
    result = await read(subscriber)
    assert result.version == 1 and result.seconds > 0.5
    assert all(torch.equal(result.tensors[name], tensor) for name, tensor in weights.items())
    slow_store.put_s, slow_store.get_s = 0.0, 60.0
    await publisher.publish(2, weights)
    with pytest.raises(StallError, match=r"weights did not finish get of hero\.data\.rank0\.part0"):
        await read(subscriber)
    slow_store.put_s = 60.0
    with pytest.raises(StallError, match=r"did not finish put of hero\.data\.rank0\.part0\.\w+ within 0\.3 s"):
        await publisher.publish(3, weights)


async def test_publishing_and_loading_take_few_calls_of_the_store(shared_store: Any) -> None:
    """Monarch keeps memory of each call in the store's process, in every step of a run."""
    publisher, subscriber, calls = publisher_of(shared_store), Subscriber(shared_store, "hero"), list[str]()
    await publisher.publish(1, full(1, 1))
    await read(subscriber)

    def counted(name: str) -> Any:
        method = getattr(shared_store, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return method(*args)

        return call

    for name in ("get", "put", "keys", "delete"):
        setattr(shared_store, name, counted(name))
    await publisher.publish(2, full(2, 1))
    assert len(calls) <= 9, calls
    calls.clear()
    assert (await read(subscriber)).version == 2
    assert len(calls) <= 7, calls


async def test_readers_of_a_busy_writer_get_whole_versions(shared_store: Any) -> None:
    publisher, versions = publisher_of(shared_store), set[int]()

    async def write() -> None:
        for version in range(1000):
            await publisher.publish(version, full(version))

    async def read_often() -> None:
        subscriber = Subscriber(shared_store, "hero")
        for _ in range(8):
            result = await read(subscriber)
            assert all(bool((tensor == result.version).all()) for tensor in result.tensors.values())
            versions.add(result.version)
            await asyncio.sleep(0.002)  # the writer goes on

    await publisher.publish(0, full(0))
    async with running(write()) as writing:
        await asyncio.gather(read_often(), read_often())
        assert not writing.done()
    assert len(versions) > 1 and shared_store.keys_with("lease", "request") == []


async def test_two_publishers_of_one_name_fail_without_torn_reads(shared_store: Any) -> None:
    shared_store.heartbeat_timeout_s = 0.05
    versions, errors = list[int](), list[ForgeError]()

    async def write(first: int) -> None:
        publisher = publisher_of(shared_store)
        for version in range(first, 20, 2):
            try:
                await publisher.publish(version, full(version))
            except ForgeError as error:
                errors.append(error)
                await asyncio.sleep(0)

    async def read_often() -> None:
        for _ in range(4):
            with contextlib.suppress(StallError, UnknownIdError):
                versions.append(await read_whole(shared_store))

    await asyncio.gather(write(0), write(1), read_often())
    assert versions and errors


async def test_writer_waits_for_a_slow_reader_that_makes_progress(remote_store: Any) -> None:
    remote_store.get_s = 0.15  # a fetch of four parts takes twice the silence of a dead reader
    publisher, subscriber = publisher_of(remote_store), Subscriber(remote_store, "hero")
    last = 0

    async def write(most: int) -> None:
        nonlocal last
        while last < most:
            await publisher.publish(last, full(last, 1, 1024))
            last += 1
            await asyncio.sleep(0.05)

    await write(1)
    async with running(write(1000)):
        result = await asyncio.wait_for(read(subscriber), 20)
        assert bool((result.tensors["w0"] == result.version).all())
        assert last - result.version <= 2
    await subscriber._lease.renew(remote_store)  # and makes no progress
    started = time.monotonic()
    await write(last + 1)
    assert time.monotonic() - started > remote_store.heartbeat_timeout_s
    assert remote_store.keys_with("lease") == []


async def test_generated_tensors_are_not_kept(remote_store: Any) -> None:
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
            most = max(most, sum(reference() is not None for reference in made))

    publisher = publisher_of(remote_store)
    for version in (1, 2):
        await publisher.publish(version, tensors)
    result = await read(Subscriber(remote_store, "hero"))
    assert {name: float(tensor[0]) for name, tensor in result.tensors.items()} == {f"w{i}": i for i in range(6)}
    assert (most, num_calls) == (0, 3)  # the first version calls it once more, for names and shapes
    shape = (9,)
    with pytest.raises(ValueError, match=r"'w5' of weights 'hero' has the shape \[9\], but had the shape \[8\]"):
        await publisher.publish(3, tensors)
    with pytest.raises(ValueError, match="'hero' lack w0, w1, w2"):
        await publisher.publish(3, list)


@pytest.mark.parametrize("requested", [None, 3])
async def test_reader_waits_for_a_version_that_is_being_written(slow_store: Any, requested: int | None) -> None:
    publisher, subscriber = publisher_of(slow_store), Subscriber(slow_store, "hero")
    await publisher.publish(1, full(1, 1))
    async with running(publisher.publish(3, full(3, 1))) as writing:
        await asyncio.sleep(0.02)
        with pytest.raises(UnknownIdError, match="no version 1. Existing versions: none, and 3 is being written"):
            await read(subscriber, 1)
        assert (await read(subscriber, requested)).version == 3 and writing.done()


class SlowTensors:
    """Yields tensors with a pause before each, and stops before the last two while `free` is not set."""

    def __init__(self) -> None:
        self.pause_s, self.free = 0.0, threading.Event()
        self.free.set()

    def __call__(self) -> Iterator[tuple[str, Any]]:
        for i in range(8):
            time.sleep(self.pause_s)
            assert i < 6 or self.free.wait(60)
            yield f"w{i}", torch.full((128,), 2.0)


@pytest.fixture
def slow_publisher(remote_store: Any) -> Iterator[Publisher]:
    remote_store.heartbeat_timeout_s = 0.6  # half of the waits below, for busy machines
    with ThreadPoolExecutor(1) as thread:
        yield publisher_of(remote_store, thread=thread)


@pytest.mark.parametrize(
    ("lease_held_s", "pause_s", "put_s"),
    [(1.2, 0.0, 0.0), (0.0, 0.2, 0.0), (0.0, 0.0, 0.3)],
    ids=["for a reader", "for tensors", "for parts"],
)
async def test_readers_wait_for_a_slow_writer(
    slow_publisher: Publisher, remote_store: Any, lease_held_s: float, pause_s: float, put_s: float
) -> None:
    tensors = SlowTensors()
    await slow_publisher.publish(1, tensors)
    tensors.pause_s, remote_store.put_s = pause_s, put_s
    other = Subscriber(remote_store, "hero")
    if lease_held_s:
        await other._lease.renew(remote_store)
    async with other._lease.renewing(remote_store):
        started = time.monotonic()
        writing = asyncio.ensure_future(slow_publisher.publish(2, tensors))
        await asyncio.sleep(0.02)
        reading = asyncio.ensure_future(read(Subscriber(remote_store, "hero")))
        await asyncio.sleep(lease_held_s)
    await other._lease.release(remote_store)
    await writing
    assert (await reading).version == 2
    assert time.monotonic() - started > 2 * remote_store.heartbeat_timeout_s


async def test_suspended_reader_and_writer_do_not_appear_as_hung(remote_store: Any) -> None:
    """As by Ctrl-Z and `fg`: neither has made progress meanwhile."""
    remote_store.heartbeat_timeout_s = 1.0
    publisher, lease = publisher_of(remote_store), Subscriber(remote_store, "hero")._lease
    await publisher.publish(1, full(1))
    await lease.renew(remote_store)
    waits_for_reader = asyncio.ensure_future(publisher.publish(2, full(2)))
    await asyncio.sleep(0.02)
    waits_for_writer = asyncio.ensure_future(read(Subscriber(remote_store, "hero")))
    await asyncio.sleep(0.02)
    time.sleep(1.1)  # noqa: ASYNC251  # blocks both
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert remote_store.keys_with("lease") and not waits_for_reader.done() and not waits_for_writer.done()
    await lease.release(remote_store)
    await waits_for_reader
    assert (await waits_for_writer).version == 2


async def test_readers_name_a_writer_that_makes_no_progress(slow_publisher: Publisher, remote_store: Any) -> None:
    tensors, timeout_s = SlowTensors(), remote_store.heartbeat_timeout_s
    await slow_publisher.publish(1, tensors)
    tensors.pause_s = 0.02
    tensors.free.clear()
    writing = asyncio.ensure_future(slow_publisher.publish(3, tensors))
    await asyncio.sleep(timeout_s)
    started = time.monotonic()
    with pytest.raises(StallError, match=r"process \d+, .* version 3, has made no progress for [1-9]\d* s"):
        await read(Subscriber(remote_store, "hero"))
    assert timeout_s < time.monotonic() - started < 30  # a busy machine takes its time
    other_rank = Process(place="another rank's", pid=1)
    remote_store.values["hero.progress"] = LeaseRecord(owner=other_rank, renewals=1)
    waiting = asyncio.ensure_future(read(Subscriber(remote_store, "hero")))
    for renewals in range(2, 8):  # the first rank has done its part, another has not
        await asyncio.sleep(timeout_s / 4)
        remote_store.values["hero.progress"] = LeaseRecord(owner=other_rank, renewals=renewals)
    assert not waiting.done()
    with pytest.raises(StallError, match=r"has made no progress for [1-9]\d* s"):
        await waiting
    tensors.free.set()
    await writing


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


async def test_unfinished_version_is_named_and_replaced_by_the_next_writer(remote_store: Any, ended_pid: int) -> None:
    class Broken(Publisher):
        def _pack(self, *arguments: Any) -> None:
            raise OSError("out of reach")

    class Second(Publisher):
        def _pack(self, *arguments: Any) -> None:
            assert remote_store.keys_with("data") == []  # freed before
            super()._pack(*arguments)

    subscriber = Subscriber(remote_store, "hero")
    await publisher_of(remote_store).publish(1, full(1, 1))
    with pytest.raises(OSError, match="out of reach"):
        await Broken(remote_store, "hero").publish(2, full(2, 1))
    started = time.monotonic()
    with pytest.raises(StallError, match=r"'hero' have no complete version: .* version 2, has") as caught:
        await read(subscriber)
    assert caught.value.who == "writer of hero" and re.search(r"has made no progress for \d+ s", str(caught.value))
    assert time.monotonic() - started > remote_store.heartbeat_timeout_s
    index = remote_store.values["hero.index"]
    writer = Process(place=memory_domain(), pid=ended_pid)
    remote_store.values["hero.index"] = Index(stamp=1, write=Write(version=2, writer=writer))
    remote_store.heartbeat_timeout_s = 60.0
    with pytest.raises(StallError, match="ended before it finished"):  # at once
        await read(subscriber)
    remote_store.values["hero.index"] = index
    await Second(remote_store, "hero").publish(2, full(2, 1))
    assert (await read(subscriber)).version == 2


async def test_version_is_pulled_once_per_host(remote_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []
    get = remote_store.get

    async def counting_get(key: str) -> Any:
        parts.extend([key] if "part" in key else [])
        return await get(key)

    def on(host: str) -> Subscriber:
        with monkeypatch.context() as there:
            there.setattr(_records, "memory_domain", lambda: f"{host} of {os.getpid()}")
            return Subscriber(remote_store, "hero")

    async def check_in_place(subscriber: Subscriber, version: int) -> None:
        async with subscriber.load() as weights:
            await asyncio.to_thread(weights.check)
            assert {float(tensor[0]) for tensor in weights.tensors.values()} == {version}

    monkeypatch.setattr(remote_store, "get", counting_get)
    remote_store.get_s, remote_store.heartbeat_timeout_s = 0.02, 20.0
    publisher = publisher_of(remote_store)
    readers = {host: [on(host) for _ in range(3)] for host in ("a", "b")}
    for version in (1, 2, 2, 3):
        await publisher.publish(version, full(version, 4, 300))
        parts.clear()
        await asyncio.gather(*(check_in_place(reader, version) for host in readers.values() for reader in host))
        await check_in_place(readers["a"][0], version)
        assert len(parts) == 2 * 5  # five parts, two hosts
        segments = [_segments.segment_of(reader._host_copy._pages[0]) for host in readers.values() for reader in host]
        assert len({segment.inode for segment in segments if segment is not None}) == 2  # one set of pages per host
    assert remote_store.keys_with("lease") == []
    del readers["a"][0]  # it may be the one that pulled: another offers the pages
    parts.clear()
    await asyncio.gather(*(check_in_place(reader, 3) for reader in [*readers["a"], on("a")]))
    assert len(parts) in (0, 5)


async def test_puller_waits_for_readers_and_a_stalled_puller_is_named(remote_store: Any) -> None:
    remote_store.heartbeat_timeout_s = 20.0
    publisher, slow, quick = publisher_of(remote_store), *(Subscriber(remote_store, "hero") for _ in range(2))
    await publisher.publish(1, full(1, 1, 300))
    reads, ended = asyncio.Event(), list[str]()

    async def load(name: str, subscriber: Subscriber, version: int, seconds: float) -> None:
        async with subscriber.load() as weights:
            reads.set()
            await asyncio.sleep(seconds)
            assert bool((weights.tensors["w0"] == version).all())
            await asyncio.to_thread(weights.check)
            ended.append(name)

    reading = asyncio.ensure_future(load("slow", slow, 1, 0.3))
    await reads.wait()
    await publisher.publish(2, full(2, 1, 300))
    assert not ended  # the host has separate pages: the learner goes on
    await load("quick", quick, 2, 0)
    await reading
    assert ended == ["slow", "quick"]
    remote_store.heartbeat_timeout_s = 0.2
    await publisher.publish(3, full(3, 1, 300))
    late = Subscriber(remote_store, "hero")
    lock = _host_copy._lock(late._host_copy._lock_name)
    assert lock is not None and late._host_copy._lock_name not in Path("/proc/net/unix").read_text()
    assert _host_copy._lock(late._host_copy._lock_name) is None
    message = f"process {os.getpid()}, which pulls them for all processes here, has made no progress"
    with lock, pytest.raises(StallError, match=message):
        await read(late)
    assert (await read(late)).version == 3


async def test_overwritten_pages_are_detected(shared_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_lease(lease: Any, client: Any) -> None:
        lease.held = False

    monkeypatch.setattr(_records.Lease, "renew", no_lease)
    publisher, subscriber = publisher_of(shared_store), Subscriber(shared_store, "hero")
    await publisher.publish(1, full(1, 1, 300))
    async with subscriber.load() as weights:
        assert bool((weights.tensors["w0"] == 1.0).all())
        await asyncio.to_thread(weights.check)
        await publisher.publish(2, full(2, 1, 300))
        assert bool((weights.tensors["w0"] == 2.0).all())  # the pages themselves, no copy
        with pytest.raises(StallError, match="'hero' version 1 were overwritten while they were read"):
            await asyncio.to_thread(weights.check)
    assert subscriber._host_copy._pages == {}


def test_segment_is_closed_when_the_globals_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = _segments.try_create(1)
    assert segment is not None
    fd = segment._fd
    monkeypatch.setattr(_segments, "os", None)  # as at the end of a process
    del segment
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
