"""Several hosts, as processes of this machine: a run on them, weights between them, and one of them killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cases
import numpy as np
import psutil
import pytest
from process_checks import children_of, command_of, ended_within, free_port, runs

import forge_agents as fa
from forge_agents.envs.workers import env as workers
from forge_agents.errors import ActorDiedError, HostError, StallError
from forge_agents.runtime import mesh
from forge_agents.runtime.machine import memory_domain
from forge_agents.runtime.processes import environment
from forge_trainers.rl.tasks import TaskSampler

pytestmark = pytest.mark.timeout(900)


@fa.register("hosts/Letters-v0", max_turns=1)
class Letters(cases.Letters):
    possible_agents = ("writer",)


def host_pid(name):
    """The process that is a host."""
    (pid,) = (pid for pid in children_of(os.getpid()) if f"/{name} --end-with-stdin" in command_of(pid))
    return pid


def kill_host(name):
    """The host's process and all processes on it, at once, as when a machine loses power."""
    session = host_pid(name)
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def host_of(pid):
    return environment(pid).get("FORGE_AGENTS_HOST", "")


ACTORS = """
import os
from forge_agents.runtime._monarch import Actor, concurrent_endpoint

class Resident(Actor):
    @concurrent_endpoint
    async def pid(self):
        return os.getpid()
"""


def test_processes_of_a_killed_host_restart_on_another(run, import_actors):
    from forge_agents.runtime.heartbeat import Heartbeat

    resident = import_actors("host_residents", ACTORS).Resident

    async def start(name, role, procs=1):
        on = mesh.spawn_procs(name, role=role, procs=procs, threads=1)
        heartbeat = Heartbeat(on, procs, name=name, heartbeat_timeout_s=300)
        pids = await mesh.call_all(on.spawn("resident", resident), procs, "pid", timeout_s=300, who=name)
        return on, heartbeat, pids

    async def main():
        config = fa.Hosts(kind="process", hosts={"learner": 2, "engines": 1})
        await mesh.launch_hosts(config, paths=[Path(__file__)])
        with pytest.raises(HostError, match="Close their trainer"):
            await mesh.launch_hosts(fa.Hosts())
        hosts = [host_pid(name) for name in ("learner-0", "learner-1", "engines-0")]
        ranks, ranks_pulse, rank_pids = await start("ranks", "learner", 2)
        assert [host_of(pid) for pid in rank_pids] == ["learner-0", "learner-1"]
        await mesh.exchange_addresses(ranks, 300, who="ranks")
        _, replica_pulse, (replica,) = await start("replica", "engines")
        assert host_of(replica) == "engines-0"
        assert mesh.memory_domain_of(ranks) != memory_domain()

        kill_host("learner-1")
        error = await mesh.with_deadline(ranks_pulse.lost(), 200, who="ranks", what="its end")  # its silence: 300
        assert isinstance(error, ActorDiedError) and "host learner-1" in str(error)
        assert replica_pulse.error is None
        await mesh.stop(ranks)
        assert gone(rank_pids[0])  # its host lives and is asked to end it
        again, again_pulse, again_pids = await start("ranks", "learner", 2)
        assert [host_of(pid) for pid in again_pids] == ["learner-0", "learner-0"]
        again_pulse.end()
        replica_pulse.end()
        await mesh.stop(again)
        return [*hosts, replica]

    async def ended():
        async with mesh.session():
            left = await main()
        assert all(map(gone, left))

    run(ended())


WHEREABOUTS = """
import os, time
import forge_agents as fa

class Whereabouts(fa.TurnEnv):
    possible_agents = ("guest",)

    def setup(self, rng):
        pass

    def instructions(self, agent):
        return "Wait."

    def observe_text(self, agent):
        return os.environ.get("FORGE_AGENTS_HOST", "") + " " + str(os.getpid())

    def act(self, agent, action):
        time.sleep(float(action) if "FORGE_AGENTS_HOST" in os.environ else 0)
        return fa.Outcome(rewards={agent: 1.0}, done=True)
"""


def test_environments_use_their_hosts_and_then_this_one(run, import_actors):
    from forge_agents.rollout.rollout import Rollout

    import_actors("host_whereabouts", WHEREABOUTS)
    fa.register("hosts/Whereabouts-v0", entry_point="host_whereabouts:Whereabouts", step_timeout_s=900.0)
    source = TaskSampler("hosts/Whereabouts-v0", hosts=fa.Hosts(kind="process", hosts={"envs": 2}))
    pids = []

    async def visit(seconds, episodes):
        """The hosts of as many episodes at once, or their errors."""
        guest = fa.Scripted(lambda *_: seconds, name="guest")
        rollout = Rollout(
            make_env=lambda: source.make("hosts/Whereabouts-v0"), env_id="hosts/Whereabouts-v0", policies=guest
        )
        result = []
        for episode in (await rollout.group(0, episodes)).episodes:
            if episode.error is not None:
                result.append(episode.error.message)
                continue
            host, _, pid = episode.trajectories["guest"].turns[0].observation.rpartition(" ")
            pids.append(int(pid))
            result.append(host)
        return result

    async def main():
        await mesh.launch_hosts(fa.Hosts(kind="process", hosts={"envs": 2}))
        assert sorted(await visit("0", 4)) == ["envs-0", "envs-0", "envs-1", "envs-1"]

        visiting = asyncio.ensure_future(visit("600", 4))
        for_s = 0.0
        while for_s < 1:  # all are in the call that takes 600 s
            await asyncio.sleep(0.05)
            for_s = for_s + 0.05 if sum(worker.busy for worker in workers.pool().workers) == 4 else 0.0
        lost = asyncio.Event()
        mesh._clusters[-1].hosts[0].listeners.append(lambda why: lost.set())
        kill_host("envs-0")
        await asyncio.wait_for(lost.wait(), 60)
        deadline, where = time.monotonic() + 120, [""]
        while where != ["envs-1"] * 4 and time.monotonic() < deadline:  # all that it has room for
            await asyncio.sleep(0.2)
            pids_here = [worker.pid for worker in workers.pool().workers if worker.alive]
            where = [host_of(pid) for pid in pids_here if pid is not None]
        assert where == ["envs-1"] * 4
        kill_host("envs-1")
        visited = await visiting  # an episode whose worker dies is played once more, elsewhere
        assert visited.count("") == 2 and sum("host envs-1" in one and "is lost" in one for one in visited) == 2
        assert await visit("0", 1) == [""]

    async def ended():
        async with mesh.session():
            await main()

    run(ended())
    assert len(set(pids)) >= 5 and all(map(gone, pids))


CONTROLLER = """
import asyncio, sys
from pathlib import Path
import forge_agents as fa
from forge_agents.runtime import mesh

async def main():
    await mesh.launch_hosts(fa.Hosts(kind="attach", workers={"engines": (sys.argv[1],)}))
    mesh.spawn_procs("sitter", role="engines", threads=1)
    while not list(mesh.log_folder("sitter").glob("*.pid")):
        await asyncio.sleep(0.1)
    print((next(mesh.log_folder("sitter").glob("*.pid"))).read_text(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_host_ends_with_a_killed_controller(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    host = subprocess.Popen([sys.executable, "-m", "forge_agents.runtime.host_process", "--address", address])
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, address], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout is not None
        sitter = int(controller.stdout.readline())
        assert runs(sitter) and host.poll() is None
        controller.kill()
        host.wait(60)
        assert gone(sitter)
    finally:
        for process in (controller, host):
            process.kill()
            process.wait(60)


def test_unreachable_host_is_named(run, tmp_path):
    hosts = fa.Hosts(kind="attach", workers={"engines": (f"ipc://{tmp_path}/nobody",)}, start_timeout_s=1)
    with pytest.raises(StallError, match=r"hosts engines-0, ipc://.*nobody, did not answer within start_timeout_s=1"):
        run(mesh.launch_hosts(hosts))


class Sabotage:
    """The environment's reward. Kills a host at each call in a step to be disturbed."""

    def __init__(self, **hosts):
        self._hosts, self._calls = {call: name.replace("_", "-") for name, call in hosts.items()}, 0
        self.struck: list[float] = []

    def __call__(self, trajectories):
        self._calls += 1
        if host := self._hosts.get(self._calls):
            kill_host(host)
            self.struck.append(time.time())
        return np.array([trajectory.reward for trajectory in trajectories], dtype=np.float32)


def test_run_continues_after_engine_and_learner_hosts_are_killed(tiny_llama, tmp_path):
    config = fa.GRPOConfig(
        group_size=2,
        groups_per_step=2,
        engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.02, threads=1, max_model_len=128),
        learner=fa.LearnerConfig(threads=1, compute_dtype="float32"),
        checkpoint_every=1,
    )
    policy = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=8))
    reward = Sabotage(engines_0=2, learner_0=4)
    hosts = fa.Hosts(kind="process", hosts={"learner": 1, "engines": 2})
    with fa.GRPOTrainer(policy, reward, config, tmp_path / "run", hosts) as trainer:
        trainer.fit("hosts/Letters-v0", steps=4)
        left = [host_pid("engines-1"), *(pid for entry in mesh._spawned.values() for pid in mesh.pids(entry.mesh))]
        assert {host_of(pid) for pid in left[1:]} == {"engines-1"} and len(left) == 4

    assert all(map(gone, left))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 5))
    assert [row["learner/version"] for row in rows] == [1, 2, 3, 4]
    faults = [json.loads(line) for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
    noticed = [(row["who"], row["time"]) for row in faults if row["event"] == "noticed"]
    # by the end of their hosts, not by their silence
    assert noticed[0][0] == "team" and noticed[0][1] - reward.struck[0] < config.heartbeat_timeout_s / 2
    lost = {who: time_ - reward.struck[1] for who, time_ in noticed[1:]}
    assert {"team-learner", "weights"} <= set(lost)
    assert max(lost["team-learner"], lost["weights"]) < config.heartbeat_timeout_s / 2
    assert sorted(row["who"] for row in faults if row["event"] == "recovered") == sorted(who for who, _ in noticed)


def gone(pid):
    """Return whether the process ends within ten seconds."""
    return ended_within([pid], 10)
