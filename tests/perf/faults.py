"""Kill and hang every kind of process in every phase of a run, and tell what became of the run.

    python tests/perf/faults.py [SESSION ...] [--out FOLDER] [--table FILE]

A session is one training run on a tiny model with a plan of faults, each in a phase of a step of its own; its metrics
are compared, step by step, with those of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_worlds
from fault_worlds import FLAG
from perf_common import kill_marked, markdown, read_lines, start_marked

ENV = "faults/Letters-v0"
GROUPS, SIBLINGS = 2, 4
HEARTBEAT_TIMEOUT_S = 30.0
BLOCK_S, STEP_S = 60.0, 8.0
SESSION_S = 3600.0
START_S = 900.0
ORPHANS_S = 10.0
NOT_COMPARED = re.compile(r"time/|idle/|.*(_s|_bytes|mfu)$")
"""Metrics that depend on the machine: times, rates, memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault at the beginning of a phase of a step, with its target."""

    who: str
    """"engine", "learner", "store", "env worker", "controller", or what hangs by itself."""
    phase: str
    step: int
    how: str = "kill"
    """"kill", "stop" (SIGSTOP), or "flag": the code itself hangs."""
    after_s: float = 0.0
    """Seconds into the phase."""

    @property
    def name(self) -> str:
        verb = {"kill": "killed", "stop": "stopped (SIGSTOP)", "flag": "sleeps for an hour"}[self.how]
        return f"{self.who} {verb}"


PHASES = ("evaluate", "collect", "checkpoint", "judge", "learn", "sync")
"""In an order in which evaluations and checkpoints fall on odd steps, where the run has them."""
DELAYS = {"start": 1.0, "collect": 0.1, "learn": 0.02, "evaluate": 0.1}


def _kills(who: str, first: int) -> tuple[Fault, ...]:
    """One fault in each phase, in as many steps. `first` is odd."""
    return tuple(
        Fault(who=who, phase=phase, step=first + i, after_s=DELAYS.get(phase, 0.0)) for i, phase in enumerate(PHASES)
    )


def _at_start(who: str) -> Fault:
    return Fault(who=who, phase="start", step=-1, after_s=DELAYS["start"])


LOAD_S = 0.01
"""Into a weight load, which takes 0.05 to 0.1 s."""
MACHINERY = (
    *map(_at_start, ("store", "engine", "learner")),
    *_kills("engine", 1),
    *_kills("learner", 7),
    *_kills("store", 13),
    Fault(who="env worker", phase="evaluate", step=19, after_s=0.05),
    Fault(who="env worker", phase="collect", step=20, after_s=0.05),
    Fault(who="engine", phase="collect", step=21, how="stop", after_s=0.05),
    Fault(who="engine", phase="sync", step=22, how="stop"),
    Fault(who="learner", phase="checkpoint", step=23, how="stop"),
    Fault(who="learner", phase="learn", step=24, how="stop"),
    Fault(who="store", phase="collect", step=25, how="stop"),
    Fault(who="store", phase="sync", step=26, how="stop"),
    Fault(who="env in a worker", phase="collect", step=27, how="flag"),
)
SESSIONS: dict[str, tuple[Fault, ...]] = {
    "reference": (),
    "sample": (
        Fault(who="engine", phase="collect", step=1, after_s=0.1),
        Fault(who="learner", phase="learn", step=2, after_s=0.02),
        Fault(who="store", phase="sync", step=3),
        Fault(who="env worker", phase="collect", step=4, after_s=0.05),
    ),
    "machinery": MACHINERY,
    "controller": (_at_start("controller"), *_kills("controller", 1)),
    "code": (
        Fault(who="env", phase="collect", step=1, how="flag"),
        Fault(who="endpoint", phase="collect", step=2, how="flag"),
        Fault(who="verifier", phase="judge", step=3, how="flag"),
        Fault(who="reward function", phase="judge", step=4, how="flag"),
    ),
    "reference-2-ranks": (),
    "rank-2-ranks": (
        Fault(who="learner rank 1", phase="learn", step=1, after_s=0.02),
        Fault(who="learner rank 1", phase="learn", step=3, how="stop", after_s=0.02),
        Fault(who="store", phase="sync", step=4),
    ),
    "rank0-2-ranks": (
        Fault(who="learner rank 0", phase="learn", step=1, after_s=0.02),
        Fault(who="learner rank 0", phase="sync", step=2),
        Fault(who="learner rank 0", phase="learn", step=3, how="stop", after_s=0.02),
        Fault(who="learner rank 0", phase="checkpoint", step=5),
    ),
    "reference-2-engine-ranks": (),
    "sample-2-engine-ranks": (
        Fault(who="engine rank 1", phase="collect", step=1, after_s=0.1),
        Fault(who="learner", phase="learn", step=2, after_s=0.02),
        Fault(who="store", phase="sync", step=3),
        Fault(who="engine rank 0", phase="load", step=4, after_s=LOAD_S),
        Fault(who="env worker", phase="collect", step=4, after_s=0.05),
    ),
    "loads-2-engine-ranks": (
        Fault(who="engine rank 1", phase="load", step=1, after_s=LOAD_S),
        Fault(who="engine rank 0", phase="load", step=2, after_s=LOAD_S),
        Fault(who="engine rank 1", phase="load", step=3),
        Fault(who="engine rank 0", phase="load", step=4),
    ),
    "ranks-2-engine-ranks": (
        Fault(who="engine rank 0", phase="collect", step=1, after_s=0.1),
        Fault(who="engine rank 1", phase="sync", step=2),
        Fault(who="engine rank 1", phase="collect", step=3, how="stop", after_s=0.05),
        Fault(who="engine rank 0", phase="sync", step=4, how="stop"),
    ),
    "reference-2-policies": (),
    "policies-2-policies": (
        Fault(who="rival's engine", phase="collect", step=1, after_s=0.1),
        Fault(who="rival's learner", phase="learn", step=2, after_s=0.02),
        Fault(who="store", phase="sync", step=4),
        Fault(who="learner", phase="sync", step=5),
    ),
    "ahead-2-replicas": (
        Fault(who="engine replica 1", phase="collect", step=2, after_s=0.1),
        Fault(who="learner", phase="learn", step=4, after_s=0.02),
        Fault(who="store", phase="sync", step=6),
        Fault(who="engine replica 0", phase="sync", step=8),
        Fault(who="env worker", phase="collect", step=10, after_s=0.05),
        Fault(who="store", phase="collect", step=12, after_s=0.1),
        Fault(who="learner", phase="judge", step=14),
        Fault(who="engine replica 1", phase="learn", step=16, how="stop"),
    ),
}
WHO = {"engine": "team", "store": "weights", "rival's engine": "rival", "rival's learner": "rival-learner",
       "engine replica 0": "team-0", "engine replica 1": "team-1",
       "engine rank 0": "team", "engine rank 1": "team"}  # fmt: skip
"""Names of the actors. All others are the learner."""
STEPS = {"reference": 28, "sample": 6, "machinery": 28, "controller": 8, "code": 6, "reference-2-ranks": 6,
         "rank-2-ranks": 6, "rank0-2-ranks": 6, "reference-2-engine-ranks": 6, "sample-2-engine-ranks": 6,
         "loads-2-engine-ranks": 6, "ranks-2-engine-ranks": 6, "reference-2-policies": 7, "policies-2-policies": 7,
         "ahead-2-replicas": 18}  # fmt: skip
FLAG_WORDS = {"env": "env", "env in a worker": "env", "verifier": "verifier", "reward function": "reward",
              "endpoint": "endpoint"}  # fmt: skip


def main() -> int:
    """Run the sessions that have no result yet, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("sessions", nargs="*", help=f"of {', '.join(SESSIONS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="a JSON file per session")
    parser.add_argument("--table", type=Path, help="write the table of all results in --out there")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sessions if name not in SESSIONS]:
        parser.error(f"no session {unknown[0]!r}. Known are {', '.join(SESSIONS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.sessions or SESSIONS:
        result = arguments.out / f"{name}.json"
        if not result.exists():
            results = run_session(name, arguments.out / "runs" / name)
            result.write_text(json.dumps(results, indent=1) + "\n")
            sys.stdout.write(f"{name}: {json.dumps({k: v for k, v in results.items() if k != 'rows'})}\n")
            sys.stdout.flush()
    if arguments.table:
        arguments.table.write_text(table(arguments.out))
    return 0


def run_session(name: str, folder: Path) -> dict[str, Any]:
    """One session, started again as long as its controller dies or ends with an error."""
    folder.mkdir(parents=True, exist_ok=True)
    started, tries, orphans, ends = time.time(), 0, 0, []
    while True:
        tries += 1
        log = folder / f"log-{tries}"
        child, mark = start_marked(__file__, name, str(folder), log=log, **{FLAG: str(folder / "flag")})
        try:
            code = child.wait(SESSION_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30)
            code = None
        ended = time.time()
        left = kill_marked(mark, grace_s=ORPHANS_S)
        orphans += len(left)
        ends.append({"code": code, "time": ended, "gone_s": round(time.time() - ended, 1)})
        if code in (0, None) or tries > len(SESSIONS[name]) + 1:
            break
    run = folder / "run"
    return {
        "session": name,
        "seconds": round(time.time() - started, 1),
        "ends": ends,
        "orphans": orphans,
        "finished": ends[-1]["code"] == 0,
        "events": read_lines(folder / "events.jsonl"),
        "noticed": read_lines(run / "faults.jsonl"),
        "rows": [{**row, "step": row["step"] - 1} for row in read_lines(run / "metrics.jsonl")],  # as faults count
        "episodes": _episode_counts(run / "episodes.jsonl"),
        "weights": _digest(run / "export"),
    }


def _episode_counts(file: Path) -> dict[str, int]:
    """Episodes on disk by ``STEP/SEED``."""
    counts: dict[str, int] = {}
    for row in read_lines(file):
        key = f"{row['step'] - 1}/{row['seed']}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def _digest(folder: Path) -> str:
    """Digests of all weights of an export, empty without an export."""
    import hashlib

    files = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


# ---- the child: one controller


class Saboteur:
    """Carries the plan out, each fault once, also across controllers."""

    def __init__(self, plan: tuple[Fault, ...], folder: Path) -> None:
        self._plan, self._file = plan, folder / "events.jsonl"
        self._flag = folder / "flag"
        self.pids: Callable[[str], list[int]] = lambda who: []

    def note(self, event: str, **facts: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")

    def reached(self, phase: str, step: int) -> None:
        done = {row["fault"] for row in read_lines(self._file) if row["event"] == "planned"}
        for number, fault in enumerate(self._plan):
            if fault.phase == phase and fault.step in {step, -1} and number not in done:
                self.note("planned", fault=number)
                if fault.after_s:
                    threading.Timer(fault.after_s, self._strike, (fault,)).start()
                else:
                    self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.how == "flag":
            self._flag.write_text(FLAG_WORDS[fault.who])
            self.note("fault", fault=self._plan.index(fault))
            return
        deadline = time.monotonic() + START_S
        while not (pids := self.pids(fault.who)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.note("fault", fault=self._plan.index(fault), pids=pids[:1])
        os.kill(pids[0], signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)


def _child(name: str, folder: Path) -> None:
    import forge_agents as fa
    from forge_agents.envs.registry import register
    from forge_agents.runtime import watchdog
    from forge_agents.testing import tiny_model
    from forge_trainers.run import processes

    saboteur = Saboteur(SESSIONS[name], folder)
    model = folder / "model"
    if not model.exists():
        tiny_model(model)
    register(
        ENV,
        entry_point="fault_worlds:Letters",
        max_turns=2,
        isolation="none" if name == "code" else "process",
        step_timeout_s=STEP_S,
    )
    team = fa.Policy(str(model), name="team", sampling=fa.Sampling(max_tokens=8))
    seats: Any = team
    reward: Any = None
    if name == "code":
        mute = fa.Endpoint(_serve(), "mute", sampling=fa.Sampling(max_tokens=8), timeout_s=3.0, retries=0)
        seats = {"left": team, "right": mute}
        reward = fault_worlds.Judged()
    if name.endswith("2-policies"):
        seats = {"left": team, "right": fa.Policy(str(model), name="rival", sampling=fa.Sampling(max_tokens=8))}
    config = fa.GRPOConfig(
        group_size=SIBLINGS,
        groups_per_step=GROUPS,
        max_resamples=0,
        keep_episodes=GROUPS * SIBLINGS,
        checkpoint_every=2,
        eval_every=2,
        eval_episodes=2,
        learner_procs=2 if name.endswith("-2-ranks") else 1,
        learner=fa.LearnerConfig(lr=1e-3, threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(
            enforce_eager=True,
            kv_cache_gb=0.05,
            max_model_len=256,
            threads=1,
            replicas=2 if name.endswith("2-replicas") else 1,
            tp=2 if name.endswith("2-engine-ranks") else 1,
        ),
        max_staleness=2 if name.startswith("ahead") else 0,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        stage_timeout_s=3 * BLOCK_S if name == "code" else 600.0,
        max_logprob_gap=5.0,
    )
    watchdog.BLOCK_TIMEOUT_S, processes.MAX_RESPAWNS = BLOCK_S, len(MACHINERY)
    with fa.GRPOTrainer(seats, reward=reward, config=config, out_dir=folder / "run") as trainer:
        _sabotage(trainer, saboteur)
        try:
            trainer.fit(ENV, steps=STEPS[name])
        except BaseException as error:
            saboteur.note("error", kind=type(error).__name__, message=str(error)[:600])
            raise
    saboteur.note("finished")


def _sabotage(trainer: Any, saboteur: Saboteur) -> None:
    """Tell the saboteur of each phase as it begins, and note what fails."""
    from forge_agents.envs.workers import env as workers
    from forge_agents.rollout import rollout
    from forge_agents.runtime import mesh
    from forge_agents.serving import EngineProcess
    from forge_trainers.rl import session
    from forge_trainers.rl.collect import Collector
    from forge_trainers.rl.evaluation import Evaluator
    from forge_trainers.rl.lifecycle import Lifecycle
    from forge_trainers.rl.scoring import Scorer
    from forge_trainers.rl.weight_sync import WeightSync

    step = [0]

    def pids(who: str) -> list[int]:
        if who == "controller":
            return [os.getpid()]
        if who == "env worker":
            return [worker.pid for worker in workers.pool().workers if worker.pid is not None and worker.alive]
        name = WHO.get(who, "team-learner")
        entries = [entry for entry in mesh._spawned.values() if entry.name == name]
        result = mesh.pids(entries[-1].mesh) if entries else []
        return result[1:] if who.endswith("rank 1") else result

    def before(owner: Any, method: str, phase: str) -> None:
        original = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if phase == "collect":
                step[0] = args[1]
            saboteur.reached(phase, step[0])
            return original(*args, **kwargs)

        setattr(owner, method, wrapped)

    saboteur.pids = pids
    for owner, method, phase in (
        (Lifecycle, "start", "start"),
        (Collector, "collect", "collect"),
        (Collector, "resample", "collect"),
        (Scorer, "score", "judge"),
        (session, "train", "learn"),
        (WeightSync, "_sync", "sync"),
        (Evaluator, "evaluate", "evaluate"),
        (trainer._checkpoints, "start", "checkpoint"),
    ):
        before(owner, method, phase)
    log, play, load = session.log_step, rollout.play, EngineProcess.load_weights

    def logged(run: Any, at: int, *args: Any, **options: Any) -> None:
        saboteur.note("step", step=at)
        log(run, at, *args, **options)

    async def played(*args: Any, **kwargs: Any) -> Any:
        episode = await play(*args, **kwargs)
        if episode.error is not None:
            saboteur.note("episode failed", step=step[0], kind=episode.error.kind, message=episode.error.message[:300])
        return episode

    async def loaded(*args: Any, **kwargs: Any) -> Any:
        saboteur.reached("load", step[0])
        started = time.monotonic()
        try:
            return await load(*args, **kwargs)
        finally:
            saboteur.note("load ended", step=step[0], seconds=time.monotonic() - started)

    session.log_step, rollout.play = logged, played
    EngineProcess.load_weights = loaded  # type: ignore[method-assign]


def _serve() -> str:
    """An OpenAI-compatible server in this process that falls silent for one request when the flag says so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            fault_worlds.hang_if_told("endpoint")
            answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "abc"},
                                   "finish_reason": "stop"}],
                      "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}  # fmt: skip
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


# ---- the table


def table(out: Path) -> str:
    """Markdown of all sessions that have a result."""
    files = {name: out / f"{name}.json" for name in SESSIONS}
    result = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    rows = [row for name in SESSIONS if name in result for row in fault_rows(result[name], result)]
    titles = ("fault", "phase", "noticed after s", "replaced after s", "its step done after s", "episodes lost",
              "duplicates", "steps equal", "orphans", "ends")  # fmt: skip
    return markdown(titles, rows)


def fault_rows(session: dict[str, Any], found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One row per planned fault."""
    plan = SESSIONS[session["session"]]
    variant = session["session"].partition("-")[2]
    reference = found.get(f"reference-{variant}" if variant else "reference")
    rows: list[tuple[Any, ...]] = []
    for at, fault in enumerate(plan):
        strikes = (event["time"] for event in session["events"] if event["event"] == "fault" and event["fault"] == at)
        struck = next(strikes, None)
        if struck is None:
            rows.append((fault.name, _place(fault), "not reached", *[""] * 6, ""))
            continue
        until = plan[at + 1].step if at + 1 < len(plan) else STEPS[session["session"]]
        steps = range(max(fault.step, 0), until)
        rows.append(
            (
                fault.name,
                _place(fault),
                _after(struck, _first(session, struck, fault)),
                _after(struck, _replaced(session, struck)),
                _after(struck, _step_done(session, struck, max(fault.step, 0))),
                _lost(session, steps),
                _duplicates(session, steps),
                _equal(session, reference, steps),
                session["orphans"],
                _end(session, struck),
            )
        )
    return rows


def _place(fault: Fault) -> str:
    return fault.phase if fault.step < 0 else f"{fault.phase} of step {fault.step}"


def _after(struck: float, when: float | None) -> str:
    return "-" if when is None else f"{max(0.0, when - struck):.1f}"


def _first(session: dict[str, Any], struck: float, fault: Fault) -> float | None:
    """When the fault was first seen: as a death, an episode's failure, the run's error, or the controller's end."""
    seen = [row["time"] for row in session["noticed"] if row["event"] == "noticed"]
    seen += [event["time"] for event in session["events"] if event["event"] in {"episode failed", "error"}]
    if fault.who == "controller":
        seen += [end["time"] for end in session["ends"]]
    return min((when for when in seen if when >= struck - 0.05), default=None)


def _replaced(session: dict[str, Any], struck: float) -> float | None:
    over = (row["time"] for row in session["noticed"] if row["event"] == "recovered")
    return min((when for when in over if when >= struck), default=None)


def _step_done(session: dict[str, Any], struck: float, step: int) -> float | None:
    return min(
        (e["time"] for e in session["events"] if e["event"] == "step" and e["step"] == step and e["time"] > struck),
        default=None,
    )


def _lost(session: dict[str, Any], steps: range) -> int:
    """Episodes of the steps that reached no metrics, or ended in an error."""
    rows = {row["step"]: row for row in session["rows"]}
    return sum(SIBLINGS * (GROUPS if step not in rows else int(rows[step].get("groups/failed", 0))) for step in steps)


def _duplicates(session: dict[str, Any], steps: range) -> int:
    """Steps logged twice, and episodes beyond the siblings of a seed."""
    logged = [row["step"] for row in session["rows"] if row["step"] in steps]
    episodes = {key: count for key, count in session["episodes"].items() if int(key.split("/")[0]) in steps}
    return len(logged) - len(set(logged)) + sum(max(0, count - SIBLINGS) for count in episodes.values())


def _equal(session: dict[str, Any], reference: dict[str, Any] | None, steps: range) -> str:
    if session["session"].startswith("ahead"):
        return "no: its batches depend on the timing"
    if reference is None:
        return "no reference"
    rows, expected = ({row["step"]: row for row in one["rows"]} for one in (session, reference))
    worst = 0.0
    for step in steps:
        if step not in rows:
            return f"step {step} is missing"
        for name in filter(lambda name: not NOT_COMPARED.match(name), {**rows[step], **expected[step]}):
            ours, theirs = rows[step].get(name), expected[step].get(name)
            if (ours is None) != (theirs is None):
                return f"no {name} in step {step}"
            if ours is not None:
                worst = max(worst, abs(ours - theirs))
    return "yes" if worst == 0 else f"within {worst:.1e}"


def _end(session: dict[str, Any], struck: float) -> str:
    errors = [event["kind"] for event in session["events"] if event["event"] == "error" and event["time"] >= struck]
    if not session["finished"]:
        return "did not finish"
    again = len(session["ends"]) > 1
    return ("finished" if not again else "resumed and finished") + (f" ({errors[0]})" if errors else "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
