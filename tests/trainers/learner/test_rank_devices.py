"""Several ranks with a device each: whatever touches it runs on a thread that knows which one is its own.

There is no GPU here. In its place each rank has a fake with what CUDA has: a current device by thread, the first in
each new one; collectives of the default group, gathers and checkpoints then say on which they ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_agents.runtime.ranks import RENDEZVOUS_VARIABLE

pytestmark = pytest.mark.slow

RANK = """
import asyncio, json, sys, threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forge_agents.runtime import _monarch

_monarch.Actor, _monarch.concurrent_endpoint = object, lambda method: method  # called here, not from another process

from forge_agents.weights.publisher import Publisher
from forge_trainers.learner import checkpoint, titan
from forge_trainers.learner.actor import LearnerActor
from forge_trainers.learner.plan import LearnerPlan

rank, folder, model = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
seen = []


class Devices:
    def __init__(self):
        self.here = threading.local()

    def set_device(self, device):
        self.here.index = rank  # a learner asks for its own; the CPU that stands for it has no number

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


devices = Devices()
titan.device_utils.device_module = devices


def noted(what, call, is_on_device=lambda *args, **options: True):
    def noting(*args, **options):
        if is_on_device(*args, **options):
            seen.append((what, getattr(devices.here, "index", 0)))
        return call(*args, **options)
    return noting


def of_default_group(*args, group=None, **options):
    return group in (None, dist.group.WORLD)


for name in ("all_gather_object", "broadcast_object_list", "barrier"):
    setattr(dist, name, noted(name, getattr(dist, name), of_default_group))
DTensor.full_tensor = noted("gather", DTensor.full_tensor)
files = checkpoint._SummingFileSystem
files.create_stream = noted("checkpoint", files.create_stream)


class Store:
    name, place, heartbeat_timeout_s, kept = "store", "elsewhere", 60.0, {}

    def publisher(self, weights_name, **options):
        return Publisher(self, weights_name, **options)

    def client(self):
        return self

    async def put(self, key, value):
        self.kept[key] = value

    async def get(self, key):
        return self.kept[key]

    async def keys(self, prefix):
        return [key for key in self.kept if key.startswith(prefix)]

    async def delete(self, key):
        del self.kept[key]


async def main():
    config = LearnerPlan(model=model, compute_dtype="float32", threads=1)
    actor = LearnerActor({"hero": config}, "hero", Store(), {})
    await actor.build()
    for _ in range(2):
        await actor.publish("hero")
    await actor.start_save("hero", str(folder / "step"))
    await actor.finish_save("hero")


asyncio.run(main())
(folder / f"{rank}.json").write_text(json.dumps({"seen": seen, "backend": str(dist.get_backend())}))
"""


@pytest.mark.timeout(600)
def test_each_rank_works_on_its_own_device_whatever_thread_asks(tiny_llama, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    shared = {"WORLD_SIZE": "2", RENDEZVOUS_VARIABLE: f"file://{tmp_path}/rendezvous", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path), str(tiny_llama)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=540)
            assert rank.returncode == 0, errors[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
    for number in range(2):
        result: dict[str, Any] = json.loads((tmp_path / f"{number}.json").read_text())
        assert {what for what, _ in result["seen"]} >= {"gather", "checkpoint"}
        assert {(what, index) for what, index in result["seen"] if index != number} == set()
    assert (tmp_path / "step" / ".metadata").is_file()
