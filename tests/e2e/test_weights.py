"""Weights through the real TorchStore: exact, versioned, all or nothing, nothing left behind."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from forge_agents.errors import ActorDiedError, StallError, UnknownIdError
from forge_agents.runtime import mesh
from forge_agents.runtime.heartbeat import Heartbeat
from forge_agents.weights import Publisher, Subscriber, WeightStore, _layout

WRITERS = """
import asyncio
import os
import threading
import torch
import torch.distributed as dist
from forge_agents.runtime._monarch import Actor, current_rank, endpoint
from forge_agents.weights import Publisher, Subscriber

def filled(version):
    return {f"layer{i}.weight": torch.full((257, 64), float(version)) for i in range(8)}

class Dying(Publisher):
    def _pack(self, tensors, layout, rank, buffer):
        def half():
            yield from list(tensors)[:4]
            os._exit(3)
        super()._pack(half(), layout, rank, buffer)

class Writer(Actor):
    def __init__(self, ref, name):
        torch.set_num_threads(1)
        self.ref, self.name = ref, name
        self.publisher = Publisher(ref, name)
        self.rank = current_rank().rank

    @endpoint
    async def publish(self, first, last):
        for version in range(first, last):
            await self.publisher.publish(version, filled(version))
        return os.getpid()

    @endpoint
    async def die_in(self, version):
        await Dying(self.ref, self.name).publish(version, filled(version))

    @endpoint
    async def read_in_place(self):
        found, done = [], asyncio.Event()
        loop = asyncio.get_running_loop()
        async with Subscriber(self.ref, self.name).load() as weights:
            def load():  # as an engine's thread does, which is no actor's
                found.append(sum(float(tensor.float().sum()) for tensor in weights.tensors.values()))
                weights.check()
                found.append(weights.version)
                loop.call_soon_threadsafe(done.set)
            threading.Thread(target=load).start()
            await done.wait()
        return found

    @endpoint
    async def ask_on(self):
        client = self.ref.client()
        async def ask():
            while True:
                await client.get(f"{self.name}.index")
        self.asking = [asyncio.ensure_future(ask()) for _ in range(32)]

    @endpoint
    async def publish_shards(self, init_file, world):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=self.rank, world_size=world)
        devices = init_device_mesh("cpu", (world,))
        whole = {f"w{i}": torch.arange(15, dtype=torch.float32).reshape(5, 3) + 100 * i for i in range(5)}
        sharded = {name: distribute_tensor(tensor, devices, [Shard(0)]) for name, tensor in whole.items()}
        sharded["plain"] = torch.ones(4)
        for version in (1, 2):
            timings = await Publisher(self.ref, "sharded", dtype=torch.float32).publish(version, sharded)
        dist.destroy_process_group()
        return timings["bytes"]
"""


@pytest.fixture(scope="module", autouse=True)
def _deaths_are_noticed_soon():
    """Processes without a heartbeat are checked every second, and not as seldom as a run checks them."""
    from forge_agents.runtime import _monarch

    _monarch.poll_processes(1)
    yield
    _monarch.poll_processes(10)


@pytest.fixture(scope="module")
def writers(import_actors):
    return import_actors("weight_writers", WRITERS)


@pytest.fixture(scope="module")
def store(run):
    return run(WeightStore.start(name="test store"))


async def read(subscriber, taken, version=None, **options):
    """Copy a version and give it to `taken` once it is known to be whole."""
    async with subscriber.load(version, **options) as weights:
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    if copies:
        taken(copies, weights.version)
    return weights


class Taken:
    """Remembers the tensors of a read."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls = 0

    def __call__(self, tensors, version):
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.calls += 1


def some_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(33, 16, generator=generator),
        "model.norm.weight": torch.randn(16, generator=generator),
        "model.transposed": torch.randn(7, 5, generator=generator).t(),
        "model.steps": torch.tensor([1, 2, 3]),
        "model.scalar": torch.tensor(2.5),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("where", ["shared memory", "messages"])
def test_loaded_weights_equal_published_weights(run, store, dtype, where, monkeypatch):
    monkeypatch.setattr(_layout, "PART_BYTES", 500)
    ref = store.ref if where == "shared memory" else dataclasses.replace(store.ref, place="another host")
    name = f"exact-{where.replace(' ', '-')}-{str(dtype).removeprefix('torch.')}"
    publisher, subscriber, taken = Publisher(ref, name, dtype=dtype), Subscriber(ref, name), Taken()
    for version in (4, 5):
        weights = some_weights(version)
        timings = run(publisher.publish(version, weights))
        result = run(read(subscriber, taken))
        assert result.version == version
        assert result.num_bytes == timings["bytes"]
        expected = {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights.items()}
        assert taken.tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert taken.tensors[key].dtype == tensor.dtype
            assert torch.equal(taken.tensors[key], tensor)


def test_current_version_is_not_loaded_again(run, store):
    run(Publisher(store.ref, "have").publish(3, some_weights(0)))
    taken = Taken()
    result = run(read(Subscriber(store.ref, "have"), taken, current=lambda: 3))
    assert (result.version, result.num_bytes, taken.calls) == (3, 0, 0)


def test_freed_versions_are_refused_with_the_existing_ones(run, store):
    publisher, subscriber = Publisher(store.ref, "freed"), Subscriber(store.ref, "freed")
    for version in (1, 30, 7):  # numbers need not be consecutive
        run(publisher.publish(version, some_weights(version)))
    taken = Taken()
    assert run(read(subscriber, taken, version=7)).version == 7
    assert torch.equal(taken.tensors["model.norm.weight"], some_weights(7)["model.norm.weight"].bfloat16())
    with pytest.raises(UnknownIdError, match="no version 30. Existing versions: 7"):
        run(read(subscriber, taken, version=30))
    client = store.ref.client()
    assert len([key for key in run(client.keys()) if key.startswith("freed.")]) == 3  # index, layout, bytes


def test_unknown_weights_are_refused_with_a_suggestion(run, store):
    run(Publisher(store.ref, "rival").publish(0, some_weights(0)))
    with pytest.raises(UnknownIdError, match=r"no weights 'rivall' have been published\. .*Did you mean 'rival'"):
        run(read(Subscriber(store.ref, "rivall"), Taken()))


def test_invalid_versions_are_refused(run, store):
    publisher = Publisher(store.ref, "bad")
    with pytest.raises(ValueError, match="Versions count from 0"):
        run(publisher.publish(-1, some_weights(0)))
    with pytest.raises(ValueError, match="no tensors"):
        run(publisher.publish(1, {}))
    with pytest.raises(ValueError, match="meta device"):
        run(publisher.publish(1, {"w": torch.empty(2, device="meta")}))


def test_reader_never_sees_mixed_versions(run, store, writers):
    async def main():
        procs = mesh.spawn_procs("writer", threads=1)
        writer = procs.spawn("writer", writers.Writer, store.ref, "busy")
        await mesh.with_deadline(writer.publish.call_one(0, 1), 250, who="writer", what="publish")
        writing = asyncio.ensure_future(
            mesh.with_deadline(writer.publish.call_one(1, 40), 180, who="writer", what="publish")
        )
        subscriber, seen = Subscriber(store.ref, "busy"), []

        def check(tensors, version):
            value = float(torch.tensor(float(version)).bfloat16())
            assert all(bool((tensor == value).all()) for tensor in tensors.values())
            seen.append(version)

        while not writing.done():
            await read(subscriber, check)
        await writing
        await mesh.stop(procs)
        return seen

    seen = run(main())
    assert seen == sorted(seen)
    assert len(set(seen)) > 10


def test_killed_writer_leaves_no_version(run, store, writers):
    async def main():
        subscriber, taken = Subscriber(store.ref, "mortal"), Taken()
        for first in (100, 110):  # the second writer takes over after the first
            procs = mesh.spawn_procs("doomed", threads=1)
            watch = Heartbeat(procs, 1, name="doomed", heartbeat_timeout_s=250)
            writer = procs.spawn("writer", writers.Writer, store.ref, "mortal")
            publishing = writer.publish.call_one(first, first + 3)
            pid = await mesh.with_deadline(publishing, 250, who="doomed", what="publish")
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert "/memfd:forge-agents-weights" in mapped and "/dev/shm/" not in mapped  # nothing that could stay
            await read(subscriber, taken)
            assert all((tensor == float(first + 2)).all() for tensor in taken.tensors.values())
            with pytest.raises(ActorDiedError, match="doomed died"):
                await watch.guard(writer.die_in.call_one(first + 3))
            with pytest.raises(StallError, match=f"was writing version {first + 3}, ended before it finished"):
                await read(subscriber, taken)
        await Publisher(store.ref, "mortal").publish(8, some_weights(8))
        assert (await read(subscriber, taken)).version == 8

    run(main())


def test_stopped_reader_leaves_a_working_store(run, store, writers):
    async def main():
        await Publisher(store.ref, "wanted").publish(0, some_weights(0))
        procs = mesh.spawn_procs("reader", threads=1)
        reader = procs.spawn("reader", writers.Writer, store.ref, "wanted")
        result = await mesh.with_deadline(reader.read_in_place.call_one(), 250, who="reader", what="reading")
        assert result == [sum(float(t.bfloat16().float().sum()) for t in some_weights(0).values()), 0]
        await mesh.with_deadline(reader.ask_on.call_one(), 250, who="reader", what="question")
        await mesh.stop(procs, at_once=True)  # asked to, it ends before its answers come, and so does who sends them
        for _ in range(10):
            assert (await read(Subscriber(store.ref, "wanted"), Taken())).version == 0
            await asyncio.sleep(0.02)

    run(main())


def test_two_ranks_publish_their_shards(run, store, writers, tmp_path):
    async def main():
        procs = mesh.spawn_procs("ranks", procs=2, threads=1)
        ranks = procs.spawn("writer", writers.Writer, store.ref, "sharded")
        results = await mesh.call_all(ranks, 2, "publish_shards", str(tmp_path / "init"), 2, timeout_s=120, who="ranks")
        assert results == [5 * 60 + 16.0] * 2
        taken = Taken()
        await read(Subscriber(store.ref, "sharded"), taken)
        for i in range(5):
            assert torch.equal(taken.tensors[f"w{i}"], torch.arange(15.0).reshape(5, 3) + 100 * i)
        assert torch.equal(taken.tensors["plain"], torch.ones(4))
        await mesh.stop(procs)

    run(main())


def test_dead_store_actor_in_a_live_process_is_named(run, writers):
    async def main():
        hollow = await WeightStore.start(name="hollow store", heartbeat_timeout_s=12)
        await Publisher(hollow.ref, "any").publish(0, some_weights(0))
        folder = mesh.log_folder("hollow store")
        assert folder is not None
        held = asyncio.ensure_future(hollow.heartbeat.guard(asyncio.sleep(600)))
        for _ in range(5):
            procs = mesh.spawn_procs("reader", threads=1)
            reader = procs.spawn("writer", writers.Writer, hollow.ref, "any")
            await mesh.call_all(reader, 1, "ask_on", timeout_s=250, who="reader")
            # The store's actor dies if the reader ends before its answers come. On a busy machine they may come first.
            await mesh.stop(procs)
            if (await asyncio.wait({held}, timeout=30))[0]:
                break
        with pytest.raises((ActorDiedError, StallError), match="hollow store .*answer of the store") as caught:
            await asyncio.wait_for(held, 30)
        assert caught.value.who == "hollow store"
        assert psutil.pid_exists(int((folder / "0.pid").read_text()))
        await hollow.stop()
        following = await WeightStore.start(name="following store")  # nothing that failed is left in this process
        await Publisher(following.ref, "any").publish(1, some_weights(0))
        assert (await read(Subscriber(following.ref, "any"), Taken())).version == 1
        await following.stop()

    run(main())


def test_dead_store_is_named_at_once(run):
    async def main():
        doomed = await WeightStore.start(name="doomed store")
        publisher = Publisher(doomed.ref, "any")
        await publisher.publish(0, some_weights(0))
        folder = mesh.log_folder("doomed store")
        assert folder is not None
        held = asyncio.ensure_future(doomed.heartbeat.guard(asyncio.sleep(600)))
        await asyncio.sleep(0)
        os.kill(int((folder / "0.pid").read_text()), signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="doomed store died"):
            await asyncio.wait_for(held, doomed.ref.heartbeat_timeout_s / 2)
        with pytest.raises(ActorDiedError, match="doomed store died"):  # by Monarch, within its 30 s; no stall
            await publisher.publish(1, some_weights(1))
        await doomed.stop()
        await doomed.stop()

    run(main())
