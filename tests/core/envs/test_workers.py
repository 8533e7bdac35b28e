import asyncio
import contextlib
import copy
import os
import pickle
import re
import signal
import socket
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.envs import registry
from forge_agents.envs.workers import env as workers
from forge_agents.envs.workers._homes import Door, Here, There, obey
from forge_agents.envs.workers.process import GRACE_S
from forge_agents.errors import ForgeError, HostError, StallError
from forge_agents.rollout.rollout import Rollout, play

MODULE = '''
import os
import signal
import subprocess
import sys
import time

import forge_agents as fa


class Meet(fa.ParallelTurnEnv):
    possible_agents = ["left", "right"]

    def setup(self, rng):
        pass

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return "Where do you go?"

    def act_all(self, actions):
        return fa.Outcome(rewards=dict.fromkeys(actions, float(len(set(actions.values())) == 1)), done=True)


class Moody(fa.TurnEnv):
    """One seat, three turns; what is said may break it. The seeds in `deadly` kill the process in the second turn."""

    possible_agents = ["a"]

    def __init__(self, deadly=(), slow_s=0.0, at_close=""):
        super().__init__()
        self.deadly, self.slow_s, self.at_close = deadly, slow_s, at_close

    def close(self):
        if self.at_close and hasattr(self, "turn"):
            time.sleep(60 if self.at_close == "hang" else 0)
            raise RuntimeError("boom")

    def setup(self, rng):
        self.turn, self.number = 0, int(rng.integers(1000))

    def instructions(self, agent):
        return "Say anything."

    def observe_text(self, agent):
        return f"{self.turn}: {self.number} in {os.getpid()}"

    def act(self, agent, action):
        self.turn += 1
        time.sleep(self.slow_s)
        if action == "hang":
            time.sleep(60)
        if action == "die" or (self.turn == 2 and self.episode_seed in self.deadly):
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "leave":
            sys.exit(3)
        if action == "stop":
            raise StopIteration("no more")
        if action == "raise":
            raise LookupError("the environment's own")
        if action.startswith("child "):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open(action.split()[1], "w").write(str(child.pid))
            time.sleep(60)
        return fa.Outcome(rewards={agent: 1.0}, done=self.turn == 3, info={agent: {"turn": self.turn}})
'''


@contextlib.contextmanager
def another_host(name="far", cores=frozenset()):
    """A home for workers that is reached as one on another machine is."""
    door = Door("127.0.0.1", "127.0.0.1")
    place, knocked = door.expect()
    thread = threading.Thread(target=obey, args=(place,), daemon=True)
    thread.start()
    home = There(name, door, knocked.result(10), cores=cores, capacity=2)
    try:
        yield home
    finally:
        home.lose("the test is over")
        door.close()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module", autouse=True, params=["here", "there"])
def _module(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as hosts:
        if request.param == "there":
            workers.move([hosts.enter_context(another_host())])
        folder = tmp_path_factory.mktemp("moody")
        (folder / "moody_game.py").write_text(MODULE)
        patch.syspath_prepend(str(folder))
        fa.list_envs()
        patch.setattr(registry, "_specs", dict(registry._specs))
        fa.register("t/Moody-v0", entry_point="moody_game:Moody", isolation="process", step_timeout_s=30.0)
        fa.register("t/Hasty-v0", entry_point="moody_game:Moody", isolation="process", step_timeout_s=0.5)
        workers.use(max_workers=2)
        yield
        pids = [worker.pid for worker in workers.pool().workers]
        workers.shutdown()
        assert all(ended(pid) for pid in pids if pid)
        workers.move()


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def ended(pid):
    """Whether the process has ended: at once if it is a child of this one, soon if another host has to be told."""
    return gone_within(pid, 5 if isinstance(workers.pool().homes[0], There) else 0)


def started(env_id="t/Moody-v0", seed=1, **kwargs):
    env = fa.make(env_id, **kwargs)
    env.reset(seed=seed)
    return env


async def episode(seed, **kwargs):
    env = fa.make("t/Moody-v0", **kwargs)
    try:
        return await play(env, {"a": fa.Scripted(lambda *_: "x")}, seed=seed)
    finally:
        env.close()


def pid_of(env):
    return int(str(env.last()[0]).split()[-1])


def test_it_plays_like_any_other_in_another_process():
    env = started()
    assert pid_of(env) != os.getpid() and env.spec.isolation == "process" and env.instructions("a") == "Say anything."
    here = fa.make("t/Moody-v0", isolation="none")
    here.reset(seed=1)
    assert here.number == env.number
    env.step("x")
    assert env.last()[1:] == (1.0, False, False, {"turn": 1}) and env.observe("a").startswith("1: ")
    env.step("x")
    env.step("x")
    assert env.terminations == {"a": True}
    env.step(None)
    assert env.agents == [] and "[a] x" in env.render()
    env.close()


def test_it_keeps_the_contract():
    workers.use(max_workers=4)  # the check holds several environments at once
    assert fa.check_env("forge/KuhnPoker-v0", episodes=1, isolation="process", reward_scale=0.5).ok
    workers.use(max_workers=2)


def test_a_simultaneous_game_takes_turns_there():
    fa.register("t/Meet-v0", entry_point="moody_game:Meet", isolation="process")
    env = fa.make("t/Meet-v0")
    episode = asyncio.run(play(env, dict.fromkeys(env.possible_agents, fa.Scripted(lambda *_: "bridge")), seed=0))
    env.close()
    assert episode.error is None and [t.reward for t in episode.trajectories.values()] == [1.0, 1.0]
    assert episode.trajectories["right"].instructions == "You are right."


def test_what_the_environment_raises_is_raised_here_and_the_worker_lives():
    env = started()
    pid = pid_of(env)
    with pytest.raises(LookupError, match="the environment's own") as caught:
        env.step("raise")
    assert "moody_game.py" in caught.value.__notes__[0]
    env.reset(seed=2)
    assert pid_of(env) == pid
    env.close()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.step("x")


@pytest.mark.parametrize(("text", "how"), [("die", "SIGKILL"), ("leave", "exit status 3")])
def test_a_worker_that_dies_is_replaced(text, how):
    env = started()
    pid = pid_of(env)
    with pytest.raises(workers.WorkerDiedError, match=f"during step.*{how}"):
        env.step(text)
    assert not alive(pid) and env.agents == []
    env.reset(seed=1)
    assert pid_of(env) != pid
    env.close()


def test_a_worker_that_hangs_is_killed_with_its_children(tmp_path):
    env = started("t/Hasty-v0")
    pid, before = pid_of(env), time.monotonic()
    with pytest.raises(workers.WorkerHungError, match=r"step took longer than 0.5 s.*step_timeout_s"):
        env.step(f"child {tmp_path / 'pid'}")
    assert time.monotonic() - before < 15 and ended(pid)
    assert gone_within(int((tmp_path / "pid").read_text()), 5)


def test_a_call_ends_by_itself_when_nobody_is_left_to_kill_it():
    process = workers.Worker()
    process.call("build", 1, fa.make("t/Hasty-v0")._packed, timeout_s=60)
    process.call("reset", 1, 0, None, timeout_s=60)
    process._pipe.send_bytes(pickle.dumps(("step", (1, "hang"), 0.2 - GRACE_S)))
    assert gone_within(process.pid, 20)
    assert process.end() == -signal.SIGALRM


def test_a_worker_and_its_children_end_with_whoever_has_the_other_end_of_its_pipe(tmp_path):
    process = workers.Worker()
    process.call("build", 1, fa.make("t/Moody-v0")._packed, timeout_s=60)
    process.call("reset", 1, 0, None, timeout_s=60)
    process._pipe.send_bytes(pickle.dumps(("step", (1, f"child {tmp_path / 'pid'}"), 60.0)))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    process._pipe.close()  # as when this process is killed in the middle of a call
    assert gone_within(process.pid, 20) and gone_within(int((tmp_path / "pid").read_text()), 20)


def test_a_copy_lives_in_the_same_worker_and_goes_its_own_way():
    env = started()
    env.step("x")
    twin = copy.deepcopy(env)
    twin.step("x")
    assert pid_of(env) == pid_of(twin) and str(env.last()[0])[0] == "1" and str(twin.last()[0])[0] == "2"
    env.close()
    twin.step("x")
    assert twin.terminations == {"a": True}
    lent = len(workers.pool()._lent)
    twin.close()
    assert len(workers.pool()._lent) == lent - 1


def test_fifty_episodes_on_two_workers_lose_one_to_a_crash():
    async def collect():
        return await asyncio.gather(*(episode(seed, deadly=(17,)) for seed in range(50)))

    episodes = asyncio.run(collect())
    failed = [episode for episode in episodes if episode.error]
    assert [episode.seed for episode in failed] == [17]
    assert failed[0].error.kind == "WorkerDiedError" and failed[0].error.where == "step"
    assert len(failed[0].trajectories["a"].turns) == 2, "what was played is kept"
    assert all(episode.trajectories["a"].reward == 3.0 for episode in episodes if not episode.error)
    assert len(workers.pool().workers) <= 2


def test_a_group_plays_a_lost_episode_again():
    def text(observation, info):
        return "die" if observation.startswith("0: ") and not died.append(1) and len(died) == 1 else "x"

    died = []
    rollout = Rollout(
        make_env=lambda: fa.make("t/Moody-v0"), env_id="t/Moody-v0", seats=fa.Scripted(text), max_turns=9
    )
    group = asyncio.run(rollout.group(seed=0, size=3))
    assert [episode.error for episode in group.episodes] == [None] * 3


def test_the_loop_runs_on_while_workers_work_at_once():
    async def collect():
        at_work = []

        async def watch():
            while True:
                await asyncio.sleep(0.01)
                at_work.append(sum(worker.busy for worker in workers.pool().workers))

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(episode(1, slow_s=0.3), episode(2, slow_s=0.3))
        watching.cancel()
        return at_work

    at_work = asyncio.run(collect())
    assert len(at_work) > 10 and max(at_work) == 2


def test_an_episode_that_is_cancelled_frees_its_worker():
    async def cancel():
        env = fa.make("t/Moody-v0")
        job = asyncio.ensure_future(play(env, {"a": fa.Scripted(lambda *_: "hang")}, seed=0))
        while not (env.agents and env._worker.busy):  # noqa: ASYNC110  # what is waited for happens in a thread
            await asyncio.sleep(0.01)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        env.close()
        return await asyncio.gather(episode(1), episode(2))

    assert [episode.error for episode in asyncio.run(cancel())] == [None, None]


def test_waiting_for_a_worker_has_an_end(monkeypatch):
    held = [started(), started()]
    monkeypatch.setattr(workers.pool(), "patience_s", 0.05)
    with pytest.raises(StallError, match=r"t/Moody-v0 waited 0.05 s.*none of 2.*max_workers"):
        started()
    error = asyncio.run(episode(0)).error
    assert error.kind == "StallError" and error.where == "reset"
    for env in held:
        env.close()
    started().close()


def test_what_another_process_cannot_import_is_refused():
    class Local(fa.TurnEnv):
        possible_agents = ["a"]

    for target in (Local, lambda: None):
        fa.register(f"t/Local{len(str(target))}-v0", entry_point=target, isolation="process")
        with pytest.raises(ForgeError, match="cannot import.*package.module:Class"):
            fa.make(f"t/Local{len(str(target))}-v0")


@pytest.mark.parametrize("bad", [{"isolation": "thread"}, {"step_timeout_s": 0}])
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match="isolation=.*step_timeout_s="):
        fa.register("t/Bad-v0", entry_point="moody_game:Moody", **bad)
    with pytest.raises(ValueError, match="max_workers=0"):
        workers.Pool(0)


def call(worker):
    worker.call("close", 0, timeout_s=30)
    return worker.pid


def test_workers_spread_over_hosts_and_leave_one_that_is_lost():
    with another_host("one") as one, another_host("two") as two:
        pool = workers.Pool(homes=[one, two])
        assert pool.max_workers == 4
        lent = [pool.borrow("test") for _ in range(4)]
        assert [worker.home.name for worker in lent] == ["one", "two", "one", "two"]
        pids = [call(worker) for worker in lent]
        assert len(set(pids)) == 4

        lent[0].call("build", 7, workers._packed(registry.spec("t/Moody-v0")), timeout_s=30)
        lent[0].call("reset", 7, 1, None, timeout_s=30)
        threading.Timer(0.5, one.lose, ["host one is lost: it burns"]).start()
        started_at = time.monotonic()
        with pytest.raises(workers.WorkerDiedError, match="host one is lost: it burns"):
            lent[0].call("step", 7, "hang", timeout_s=30)
        assert time.monotonic() - started_at < 15
        assert gone_within(pids[0], 10) and gone_within(pids[2], 10) and alive(pids[1])
        for worker in lent:
            pool.give_back(worker)
        assert pool.max_workers == 2
        again = [pool.borrow("test") for _ in range(2)]
        assert {worker.home.name for worker in again} == {"two"}
        two.lose("so is this")
        with pytest.raises(workers.WorkerDiedError, match="so is this"):
            call(again[1])
        assert pool.borrow("test").home == Here()
        pool.close()


def test_workers_of_another_host_are_bound_to_its_cores():
    core = min(os.sched_getaffinity(0))
    with another_host(cores=frozenset({core})) as home:
        worker = workers.Worker(home)
        assert os.sched_getaffinity(call(worker)) == {core}
        assert worker.alive and worker.end() == -signal.SIGKILL and not worker.alive


def test_a_host_that_says_nothing_costs_a_deadline_and_no_more_when_it_is_lost(monkeypatch):
    monkeypatch.setattr("forge_agents.envs.workers._homes.START_TIMEOUT_S", 0.3)
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Door("127.0.0.1", "127.0.0.1")) as door:
        home = There("mute", door, Connection(ours.detach()), cores=frozenset(), capacity=1)
        with pytest.raises(HostError, match=r"on host mute did not connect to 127\.0\.0\.1:\d+ within 0\.3 s"):
            home.start()
        monkeypatch.setattr("forge_agents.envs.workers._homes.START_TIMEOUT_S", 30.0)
        threading.Timer(0.2, home.lose, ["host mute is lost: at last"]).start()
        started_at = time.monotonic()
        for _ in range(2):
            with pytest.raises(HostError, match="host mute is lost: at last"):
                home.start()
        assert time.monotonic() - started_at < 15 and not door._expected


def test_a_process_that_does_not_start_is_told_at_once_and_the_host_goes_on(monkeypatch):
    with another_host(cores=frozenset({4095})) as home, pytest.raises(HostError, match="worker process on far ended"):
        home.start()
    with another_host() as home:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", lambda *a, **k: (_ for _ in ()).throw(OSError("no more processes")))
            with pytest.raises(workers.WorkerDiedError, match="host far cannot start a worker process: no more proc"):
                call(lost := workers.Worker(home))
            assert not lost.alive
            with pytest.raises(workers.WorkerDiedError, match="this host cannot start a worker process: no more proc"):
                call(workers.Worker())
        worker = workers.Worker(home)
        assert call(worker) and not re.search(r"[0-9a-f]{32}", Path(f"/proc/{worker.pid}/cmdline").read_text())


def test_a_worker_that_is_ended_while_it_starts_is_not_lent_again():
    with another_host() as home:
        worker = workers.Worker(home)
        process = home.start()

        def start():
            worker.end()  # as when an episode is cancelled meanwhile
            return process

        home.start = start
        with pytest.raises(workers.WorkerDiedError, match="ended while its process started"):
            call(worker)
        assert not worker.alive and gone_within(process[1].pid, 5)


def test_who_knows_no_secret_is_sent_away():
    with contextlib.closing(Door("127.0.0.1", "127.0.0.1")) as door:
        place, knocked = door.expect()
        host, port, secret = place.rsplit(":", 2)
        for said in (b"0" * 32, b"\xff" * 32, secret[:31].encode() + b"x"):
            with socket.create_connection((host, int(port)), 5) as line:
                line.sendall(said)
                line.settimeout(5)
                assert line.recv(1) == b""
        assert not knocked.done()
        with socket.create_connection((host, int(port)), 5) as line:
            line.sendall(secret.encode())
            pipe = knocked.result(5)
            with socket.create_connection((host, int(port)), 5) as thief:  # a secret opens once
                thief.sendall(secret.encode())
                thief.settimeout(5)
                assert thief.recv(1) == b""
            pipe.close()


@pytest.mark.parametrize(("how", "said"), [("hang", "close took longer than 0.5 s"), ("raise", "boom")])
def test_a_close_that_fails_is_a_warning_has_an_end_and_holds_nobody_up(how, said):
    async def main():
        ticks = []

        async def watch():
            while True:
                await asyncio.sleep(0.01)
                ticks.append(None)

        watching = asyncio.ensure_future(watch())
        rollout = Rollout(
            make_env=lambda: fa.make("t/Hasty-v0", at_close=how), env_id="t", seats=fa.Scripted(lambda *_: "x")
        )
        group = await rollout.group(seed=1, size=1)
        watching.cancel()
        return group.episodes[0], len(ticks)

    fa.make("t/Hasty-v0", at_close=how)  # asks once what the environment is
    with pytest.warns(RuntimeWarning, match=re.escape(said)):
        episode, ticks = asyncio.run(main())
    assert episode.error is None and len(episode.turns) == 3
    assert how != "hang" or ticks > 10, "the loop ran while the environment was closing"


def test_an_exception_that_no_future_can_carry_arrives():
    rollout = Rollout(
        make_env=lambda: fa.make("t/Moody-v0"), env_id="t", seats=fa.Scripted(lambda *_: "stop"), retries=0
    )
    (failed,) = asyncio.run(asyncio.wait_for(rollout.group(seed=1, size=1), 20)).failed
    assert "StopIteration(no more)" in failed.error.message
