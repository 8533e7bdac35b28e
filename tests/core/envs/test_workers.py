import asyncio
import contextlib
import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import process_checks
import pytest
from plain_env import act
from process_checks import ended_within, holds_within
from refusals import raises

import forge_agents as fa
from forge_agents.envs import registry
from forge_agents.envs.env import acts_together, can_fork
from forge_agents.envs.workers import env as workers
from forge_agents.errors import ForgeError, StallError
from forge_agents.rollout.alternatives import ForkRule
from forge_agents.rollout.episode import play
from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime import _monarch, mesh, processes

MODULE = '''
import os
import signal
import subprocess
import sys
import time

import forge_agents as fa


class Moody(fa.TurnEnv):
    """One agent and three turns. Some actions fail. The seeds in `deadly` kill the process in the second turn."""

    possible_agents = ["a"]

    def __init__(self, deadly=(), slow_s=0.0, at_close=""):
        super().__init__()
        self.deadly, self.slow_s, self.at_close = deadly, slow_s, at_close

    def close(self):
        if self.at_close and hasattr(self, "turn"):
            time.sleep(600 if self.at_close == "hang" else 0)
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
            time.sleep(600)
        if action == "die" or (self.turn == 2 and self.episode_seed in self.deadly):
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "leave":
            sys.exit(3)
        if action == "stop":
            raise StopIteration("no more")
        if action == "alarm":  # as graders limit their time; Python lets the main thread alone do so
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            signal.pause()
        if action == "raise":
            raise LookupError("the environment's own")
        if action.startswith("child "):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(action.split()[1], "w").write(str(child.pid))
            time.sleep(600)
        return fa.Outcome(rewards={agent: 1.0}, done=self.turn == 3, info={agent: {"turn": self.turn}})
'''


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Writes the module of the test environments."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("moody")
        (folder / "moody_game.py").write_text(MODULE)
        patch.syspath_prepend(str(folder))
        fa.list_envs()
        patch.setattr(registry, "_specs", dict(registry._specs))
        fa.register("t/Moody-v0", entry_point="moody_game:Moody", isolation="process", step_timeout_s=30.0)
        fa.register("t/Hasty-v0", entry_point="moody_game:Moody", isolation="process", step_timeout_s=0.5)
        workers.use(max_workers=2)
        yield folder
        pids = [worker.pid for worker in workers.pool().workers]
        workers.shutdown()
        assert all(gone_within(pid, 60) for pid in pids if pid)


def gone_within(pid, seconds):
    return ended_within([pid], seconds)


def written(path):
    """Return whether the file exists and is not empty."""
    return path.exists() and path.read_text() != ""


class Standing:
    """A clock that stands still until an event, because the machine may be busy."""

    def __init__(self, happened):
        self.happened, self.at, self.since = happened, time.monotonic(), None

    def monotonic(self):
        if self.since is None and self.happened():
            self.since = time.monotonic()
        return self.at if self.since is None else self.at + time.monotonic() - self.since


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
    act(env, "x", "x")
    assert env.terminations == {"a": True}
    env.step(None)
    assert env.agents == [] and "[a] x" in env.render()
    env.close()


def test_it_may_handle_signals_there():
    env = started()
    env.step("alarm")
    assert env.rewards["a"] == 1.0
    env.close()


def test_it_keeps_the_contract():
    workers.use(max_workers=4)  # the check holds several environments at once
    assert fa.check_env("forge/KuhnPoker-v0", episodes=1, isolation="process", reward_scale=0.5).ok
    workers.use(max_workers=2)


def test_a_simultaneous_game_takes_turns_there():
    episode = fa.play("forge/Commons-v0", fa.Oracle(), seed=0, env_args={"isolation": "process"})
    assert episode.error is None and episode.rewards == fa.play("forge/Commons-v0", fa.Oracle(), seed=0).rewards
    assert episode.trajectories["player_1"].instructions.startswith("You are ben")
    assert acts_together(fa.make("forge/Commons-v0", isolation="process"))
    assert not acts_together(fa.make("forge/KuhnPoker-v0", isolation="process"))


def test_episodes_are_played_again_in_the_same_process(folder):
    """Copies share a process, which answers one call after another."""
    (folder / "plain_aec.py").write_text("from plain_env import PlainAEC")
    fa.register("t/PlainAEC-v0", entry_point="plain_aec:PlainAEC", isolation="process")
    moody = fa.make("t/Moody-v0")
    assert can_fork(moody) and not can_fork(fa.make("t/PlainAEC-v0"))
    rollout = Rollout(
        make_env=lambda: fa.make("t/Moody-v0"),
        env_id="t/Moody-v0",
        policies=fa.Scripted(lambda seen: "x", name="team"),
        forks=ForkRule(samples=2, decisions="every", policies={"team"}),
    )
    group = asyncio.run(rollout.group(1, 3))
    again = group.alternatives.group
    assert group.alternatives.decisions == tuple((n, turn) for n in range(3) for turn in (0, 0, 1, 1, 2, 2))
    assert not group.failed and not again.failed and {e.rewards["a"] for e in again.episodes} == {3.0}
    assert all(worker._holders == 0 and not worker.busy for worker in workers.pool().workers)


def test_its_oracle_lives_here():
    made = []

    def oracle(agent, settings, rng):
        made.append((agent, settings["deadly"], os.getpid()))
        return lambda seen: f"I read {seen}"

    fa.register("t/Taught-v0", entry_point="moody_game:Moody", isolation="process", oracle=oracle)
    episode = fa.play("t/Taught-v0", fa.Oracle(), seed=1)
    assert episode.rewards == {"a": 3.0} and made == [("a", (), os.getpid())]
    assert all(turn.action == f"I read {turn.observation}" for turn in episode.turns)


def test_calls_of_a_worker_answer_to_one_port(monkeypatch):
    env = started()  # the call that starts the process opens another port
    sender = SimpleNamespace(_send=env._worker._actor.do._send)  # without `choose` and others, which open a port each
    monkeypatch.setattr(env._worker, "_actor", SimpleNamespace(do=sender))
    env.step("x")
    with pytest.raises(LookupError, match="the environment's own"):
        env.step("raise")
    env.reset(seed=2)
    assert env.turn == 0 and env.observe("a").startswith("0: ")
    env.close()


@pytest.mark.filterwarnings("ignore:coroutine 'PortReceiver._recv' was never awaited")
def test_answer_to_an_interrupted_call_is_not_taken_for_the_next(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    env = started()
    with monkeypatch.context() as patch:
        patch.setattr(env._worker, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.step("x")
    assert (env.turn, env.number) == (1, int(env.observe("a").split()[1]))
    env.close()


def test_environment_exception_is_raised_and_the_worker_survives():
    env = started()
    pid = pid_of(env)
    with pytest.raises(LookupError, match="the environment's own") as caught:
        env.step("raise")
    assert "moody_game.py" in caught.value.__notes__[0]
    env.reset(seed=2)
    assert pid_of(env) == pid
    env.close()
    raises(RuntimeError, r"Call reset\(\)", env.step, "x")


@pytest.mark.parametrize(("text", "how"), [("die", "SIGKILL"), ("leave", "SystemExit: 3")])
def test_a_worker_that_dies_is_replaced(text, how):
    env = started()
    pid = pid_of(env)
    raises(workers.WorkerDiedError, f"during step.*{how}", env.step, text)
    assert gone_within(pid, 60) and env.agents == []
    env.reset(seed=1)
    assert pid_of(env) != pid
    env.close()


KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


@pytest.mark.skipif(KERNEL < (6, 15), reason="an older kernel may forget the exit status before this process asks")
def test_death_of_a_worker_is_explained_before_monarch_notices_it():
    _monarch.poll_processes(300)
    try:
        worker = workers.Worker()
        pid = call(worker)
        worker.call("build", 1, workers._packed(registry.spec("t/Moody-v0")), timeout_s=200)
        worker.call("reset", 1, 1, None, timeout_s=200)
        with pytest.raises(workers.WorkerDiedError, match=rf"died during step: process {pid} was ended by SIGKILL \("):
            worker.call("step", 1, "die", timeout_s=200)
    finally:
        _monarch.poll_processes(10)


def test_worker_is_replaced_after_its_call_limit_between_episodes(monkeypatch):
    workers.use(max_workers=1)
    monkeypatch.setattr(workers, "_MAX_CALLS", 4)
    env = started()  # two calls: build and reset
    first = pid_of(env)
    for _ in range(3):
        env.step("x")
    assert env.terminations == {"a": True}
    env.reset(seed=2)
    assert pid_of(env) == first
    env.close()
    assert gone_within(first, 60)
    env = started()
    second = pid_of(env)
    env.close()  # after three calls
    env = started()
    assert second != first and pid_of(env) == second
    env.close()
    workers.use(max_workers=2)


def test_hung_worker_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "time", Standing(lambda: written(tmp_path / "pid")))
    env = started("t/Hasty-v0")
    pid, before = pid_of(env), time.monotonic()
    with pytest.raises(workers.WorkerHungError, match=r"step took longer than 0.5 s.*step_timeout_s"):
        env.step(f"child {tmp_path / 'pid'}")
    assert time.monotonic() - before < 45 and gone_within(pid, 60)
    assert gone_within(int((tmp_path / "pid").read_text()), 60)


def runs(thread):
    try:
        return " T " not in (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


def test_a_worker_that_is_frozen_costs_its_deadline(monkeypatch):
    frozen = threading.Event()
    monkeypatch.setattr(workers, "time", Standing(frozen.is_set))
    env = started("t/Hasty-v0")
    pid = pid_of(env)
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(map(runs, threads.iterdir())):  # one stops the others
        time.sleep(0.01)
    frozen.set()
    raises(workers.WorkerHungError, "step took longer than 0.5 s", env.step, "x")
    assert gone_within(pid, 60)


CONTROLLER = """
import sys
sys.path.insert(0, sys.argv[1])
import forge_agents as fa
fa.register("t/Moody-v0", entry_point="moody_game:Moody", isolation="process")
env = fa.make("t/Moody-v0")
env.reset(seed=0)
print(str(env.last()[0]).split()[-1], flush=True)
env.step("child " + sys.argv[2])
"""


def test_worker_and_children_end_with_a_controller_killed_during_a_call(folder, tmp_path):
    words = [sys.executable, "-c", CONTROLLER, folder, tmp_path / "pid"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as controller:
        worker = int(controller.stdout.readline())
        while not written(tmp_path / "pid"):
            time.sleep(0.02)
        assert process_checks.runs(worker)
        controller.kill()
    assert gone_within(worker, 60) and gone_within(int((tmp_path / "pid").read_text()), 60)


def test_it_is_played_in_a_coroutine_without_await_too():
    async def main():
        env = started()
        env.step("x")
        assert env.last()[1] == 1.0
        env.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Monarch's, of a wait on the loop's thread
        asyncio.run(main())


def test_a_dropped_environment_is_closed_while_its_thread_holds_the_lock_of_the_pool():
    """A garbage collection may run the destructor at any moment."""
    env = started()
    env.step("x")
    used = workers.pool()
    lent = len(used._lent)
    with used._lock:
        del env
        gc.collect()
    assert holds_within(60, lambda: len(used._lent) == lent - 1)


def test_copy_runs_in_the_same_worker_independently():
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
        make_env=lambda: fa.make("t/Moody-v0"), env_id="t/Moody-v0", policies=fa.Scripted(text), max_turns=9
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
    raises(StallError, r"t/Moody-v0 waited 0.05 s.*none of 2.*max_workers", started)
    error = asyncio.run(episode(0)).error
    assert error.kind == "StallError" and error.where == "reset"
    for env in held:
        env.close()
    started().close()


def test_busy_worker_is_waited_for_without_limit(monkeypatch):
    class Answer:
        def get(self, timeout):
            now[0] += 1000
            return pickle.dumps((True, None))

    now, checks = [0.0], []
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pool = workers.Pool(max_workers=1)
    check, pool.patience_s = pool._check_patience, 0.01
    monkeypatch.setattr(pool, "_check_patience", lambda *args: (checks.append(1), check(*args)))
    held = pool.borrow("one that plays for hours")
    held._procs = "stub"
    held._actor = SimpleNamespace(do=SimpleNamespace(choose=lambda *_: Answer()))
    monkeypatch.setattr(held, "_new_port", lambda: None)

    async def main():
        waiting = asyncio.ensure_future(pool.borrow_async("another"))
        while len(checks) < 3:  # it steps now and then
            held.call("step", 0, "x", timeout_s=1)
            await asyncio.sleep(0)
        with held._lock:  # a step that takes long has a deadline of its own
            now[0] += 1000
            while len(checks) < 6:  # noqa: ASYNC110  # it is a list
                await asyncio.sleep(0)
        assert not waiting.done()
        held.used_at = now[0] - 1
        with pytest.raises(StallError, match="another waited 0.01 s .* none of 1 was used or returned"):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_another_process_cannot_import_is_refused():
    class Local(fa.TurnEnv):
        possible_agents = ["a"]

    for target in (Local, lambda: None):
        fa.register(f"t/Local{len(str(target))}-v0", entry_point=target, isolation="process")
        raises(ForgeError, "cannot import.*package.module:Class", fa.make, f"t/Local{len(str(target))}-v0")


@pytest.mark.parametrize("bad", [{"isolation": "thread"}, {"step_timeout_s": 0}])
def test_settings_are_checked(bad):
    raises(ValueError, "isolation=.*step_timeout_s=", fa.register, "t/Bad-v0", entry_point="moody_game:Moody", **bad)
    raises(ValueError, "max_workers=0", workers.Pool, 0)


def host_of(pid):
    """Return the name of the host, empty for the controller's host."""
    return processes.environment(pid).get("FORGE_AGENTS_HOST", "")


def call(worker):
    worker.call("close", 0, timeout_s=200)
    return worker.pid


@contextlib.contextmanager
def run_on(config):
    """Hosts of a run whose event loop runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(mesh.launch_hosts(config), loop).result(300)
        yield mesh._clusters[-1]
    finally:
        asyncio.run_coroutine_threadsafe(mesh.end_hosts(config), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def test_workers_spread_over_hosts_and_leave_a_lost_host(tmp_path, monkeypatch):
    core, spec = min(os.sched_getaffinity(0)), workers._packed(registry.spec("t/Moody-v0"))
    with run_on(fa.Hosts(kind="process", hosts={"envs": 2}, cpus={"envs": str(core)})) as layout:
        pool = workers.Pool()
        assert pool.max_workers == 8
        lent = [pool.borrow("test") for _ in range(4)]
        pids = [call(worker) for worker in lent]
        assert [host_of(pid) for pid in pids] == ["envs-0", "envs-1"] * 2 and len(set(pids)) == 4
        assert all(os.sched_getaffinity(pid) == {core} for pid in pids)
        for worker in lent:
            worker.call("build", 7, spec, timeout_s=100)
            worker.call("reset", 7, 1, None, timeout_s=100)

        with monkeypatch.context() as patch:
            patch.setattr(workers, "time", Standing(lambda: written(tmp_path / "pid")))
            with pytest.raises(workers.WorkerHungError, match="step took longer than 0.5 s"):
                lent[1].call("step", 7, f"child {tmp_path / 'pid'}", timeout_s=0.5)
        assert gone_within(pids[1], 60) and gone_within(int((tmp_path / "pid").read_text()), 60)
        raises(workers.WorkerDiedError, "died during step.*SIGKILL", lent[3].call, "step", 7, "die", timeout_s=60)

        threading.Timer(0.5, layout.lose, [layout.hosts[0], "host envs-0 is lost: it burns"]).start()
        with pytest.raises(workers.WorkerDiedError, match="host envs-0 is lost: it burns"):  # else: WorkerHungError
            lent[0].call("step", 7, "hang", timeout_s=60)
        assert not lent[2].alive
        for worker in lent:
            pool.give_back(worker)
        assert gone_within(pids[0], 60) and gone_within(pids[2], 60)
        assert pool.max_workers == 4
        again = pool.borrow("test")
        assert host_of(call(again)) == "envs-1"
        layout.lose(layout.hosts[1], "so is this")
        assert not again.alive
        pool.give_back(again)
        here = pool.borrow("test")
        pid = call(here)
        assert host_of(pid) == "" and here.reusable
    assert gone_within(pid, 60) and not here.alive
    pool.close()


def test_failed_process_start_is_reported_and_the_host_survives(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fa.Hosts, "cores_of", lambda self, role: frozenset({4095}))
        lost = workers.Worker()
        with pytest.raises(workers.WorkerDiedError, match=f"{lost.name} died during close: OSError"):
            lost.call("close", 0, timeout_s=200)  # else: WorkerHungError
        assert not lost.alive
    worker = workers.Worker()
    assert call(worker)
    worker.end()


def test_worker_ended_during_start_is_not_reused(monkeypatch):
    worker, spawn_procs, marks = workers.Worker(), mesh.spawn_procs, []

    def spawn(name, **kwargs):
        procs = spawn_procs(name, **kwargs)
        marks.append(mesh.log_folder(name).name)
        worker.end()  # as when an episode is cancelled meanwhile
        return procs

    monkeypatch.setattr(mesh, "spawn_procs", spawn)
    raises(workers.WorkerDiedError, "it was ended", call, worker)
    assert not worker.alive
    seen, deadline = time.monotonic(), time.monotonic() + 20
    while time.monotonic() < min(deadline, seen + 2):  # Monarch may still be about to start it
        if processes.with_variable(processes.MESH_VARIABLE, marks[0]) or mesh.log_folder(worker.name):
            seen = time.monotonic()
        time.sleep(0.1)
    assert not processes.with_variable(processes.MESH_VARIABLE, marks[0]) and mesh.log_folder(worker.name) is None


@pytest.mark.parametrize(("how", "said"), [("hang", "close took longer than 0.5 s"), ("raise", "boom")])
def test_failed_close_is_a_warning_and_blocks_nothing(how, said, monkeypatch):
    ticks, closing, close = [], [], workers.WorkerEnv.close

    def close_it(env):
        closing.append((len(ticks), time.monotonic()))
        close(env)

    def ticked():
        """Return whether the loop has run since then, or 30 s have passed."""
        return bool(closing) and (len(ticks) > closing[0][0] + 10 or time.monotonic() > closing[0][1] + 30)

    monkeypatch.setattr(workers.WorkerEnv, "close", close_it)
    monkeypatch.setattr(workers, "time", Standing(lambda: how == "hang" and ticked()))

    async def main():
        async def watch():
            while True:
                await asyncio.sleep(0.01)
                ticks.append(None)

        watching = asyncio.ensure_future(watch())
        rollout = Rollout(
            make_env=lambda: fa.make("t/Hasty-v0", at_close=how), env_id="t", policies=fa.Scripted(lambda *_: "x")
        )
        group = await rollout.group(seed=1, size=1)
        watching.cancel()
        return group.episodes[0]

    fa.make("t/Hasty-v0", at_close=how)  # asks once what the environment is
    with pytest.warns(RuntimeWarning, match=re.escape(said)):
        episode = asyncio.run(main())
    assert episode.error is None and len(episode.turns) == 3
    assert how != "hang" or len(ticks) > closing[0][0] + 10, "the loop ran while the environment was closing"


def test_an_exception_that_no_future_can_carry_arrives():
    rollout = Rollout(
        make_env=lambda: fa.make("t/Moody-v0"), env_id="t", policies=fa.Scripted(lambda *_: "stop"), retries=0
    )
    (failed,) = asyncio.run(asyncio.wait_for(rollout.group(seed=1, size=1), 60)).failed
    assert "StopIteration(no more)" in failed.error.message
