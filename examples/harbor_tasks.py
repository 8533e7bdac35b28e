"""Harbor tasks without containers: a command-line agent solves them, and each task's tests write the reward.

A task is used if its Dockerfile contains only FROM, WORKDIR and COPY, and if its solution earns more here than doing
nothing. Other tasks are listed. FROM is ignored: agent and tests run in sandboxes with this machine's programs and
without network. Tests that run an agent's files run them as the same user, so a solution that searches for the tests'
reward while they run may still change it, as in Harbor itself. A run of the tests takes at most an hour.

    python examples/harbor_tasks.py FOLDER --agent "COMMAND" [--reads FOLDER_OF_IT] [--steps 20] [--model NAME]
"""

import argparse
import json
import shlex
import sys
import tomllib
from pathlib import Path
from posixpath import join, normpath

import forge_agents as fa
from forge_agents.sandbox import Sandbox, SandboxLimits

SIZES = {"cpu_s": 600, "memory_mb": 4096, "processes": 64, "open_files": 256, "file_mb": 128}
DISK_MB = 512
MAX_TOML = 20_000  # a key of many parts takes quadratic time
MAX_S = 3600  # of a task's tests
READS = ("/usr", "/bin", "/sbin", sys.prefix, sys.base_prefix)
BEGIN = 'mkdir -p /logs/verifier {0}; cd {0}; export PATH={1}/bin:/usr/local/bin:/usr/bin:/bin; exec "$@" </box/task.md'
TEST = """
import os, subprocess, sys
if subprocess.run(["bash", "begin.sh", "bash", sys.stdin.read()]).returncode < 0:
    sys.exit("the tests were killed")
try:
    os.kill(-1, 0)  # any other process of the sandbox
except ProcessLookupError:
    sys.exit()
sys.exit("a process of the tests still runs")
"""


def inside(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def leaves(link, folder):
    """Whether a link leads out of its task. The task itself may be no link."""
    return link == folder or not link.resolve().is_relative_to(folder.resolve())


def image(context):
    """The working folder and the files that a Dockerfile makes."""
    here, made = "/", {}
    for line in (context / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        word, *rest = line.split() or "#"
        if word == "COPY" and len(rest) == 2 and (source := (context / rest[0]).resolve()).is_relative_to(context):
            name = source.name if rest[1].endswith(("/", ".")) else ""
            copied = inside(source) if source.is_dir() else {name: inside(source.parent)[source.name]}
            made |= {normpath(join(here, rest[1], to))[1:]: data for to, data in copied.items()}
        elif word == "WORKDIR":
            here = normpath(join(here, *rest))
        elif word != "FROM" and not word.startswith("#"):
            raise ValueError(f"its Dockerfile needs a container: {line[:80]!r}")
    return here, made


class Task:
    """Files of a task for agent and tests. The tests get the agent's files in `places`, such as "app"."""

    def __init__(self, folder):
        if links := [path.name for path in (folder, *folder.rglob("*")) if path.is_symlink() and leaves(path, folder)]:
            raise ValueError(f"links of it lead to other folders: {links[:5]}")
        if sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > DISK_MB << 20:
            raise ValueError(f"its files have more than the {DISK_MB} MB of a sandbox")
        if (folder / "task.toml").stat().st_size > MAX_TOML:
            raise ValueError(f"its task.toml has more than {MAX_TOML} bytes")
        settings = tomllib.loads((folder / "task.toml").read_text())
        machine = settings.get("environment", {})
        needs = [name for name in ("mcp_servers", "healthcheck", "env", "gpus", "tpu") if machine.get(name)]
        if needs := [*needs, *(path.name for path in folder.glob("environment/*compose*"))]:
            raise ValueError(f"it needs a container, for its {' and '.join(needs)}")
        here, made = image(folder.resolve() / "environment")
        here = machine.get("workdir", here)
        begin = BEGIN.format(shlex.quote(here), sys.prefix).encode()
        self.begin = {"begin.sh": begin, "task.md": (folder / "instruction.md").read_bytes()}
        self.start, self.places = made, {name.split("/")[0] for name in (*made, here[1:])}
        self.tests, solution = ({f"{n}/{f}": d for f, d in inside(folder / n).items()} for n in ("tests", "solution"))
        self.limits = {**SIZES, "wall_s": min(settings.get("verifier", {}).get("timeout_sec", 600), MAX_S)}
        idle, right = self.paid(made), self.paid(self.run("/solution/solve.sh", made | solution).files)
        if not right > idle:
            raise ValueError(f"its own solution earns {right} here, nothing done {idle}: {self.output!r}")

    def run(self, script, files):
        """Run a script of the task by bash, on these files."""
        limits = SandboxLimits(**self.limits, disk_mb=DISK_MB, files=20_000)
        box = Sandbox(limits=limits, import_paths=READS, folders=folders(self.places))
        return box.run(TEST, stdin=script, files={**files, **self.begin}, collect=True)

    def paid(self, left):
        """Reward that the task's tests write for the remaining files, or 0 if they write nothing."""
        places = self.places - {"logs", "tests", "solution"}  # where an agent could leave a reward, or other tests
        files = {name: data for name, data in left.items() if name.split("/")[0] in places}
        tested = self.run("/tests/test.sh", files | self.tests)
        self.output = (tested.limit or tested.stderr or tested.stdout)[-200:]
        if tested.exit_code:
            return 0.0
        files = (tested.files.get(f"logs/verifier/reward.{kind}") for kind in ("json", "txt"))
        return reward_in([text for text in files if text is not None])


def reward_in(texts):
    """Reward in the one file with a reward. 0 if there are none or several, or it is no number from 0 to 1.

    Tests and solution run as one user, so a solution that the tests run may write one in addition to theirs.
    """
    try:
        reward = json.loads(texts[0]) if len(texts) == 1 else 0
        reward = float(reward["reward"] if isinstance(reward, dict) else reward)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return 0.0
    return reward if 0 <= reward <= 1 else 0.0


def folders(places):
    return tuple(sorted(f"/{place}" for place in {*places, "logs", "tests", "solution", "tmp"}))


def register(folder, agent, reads=()):
    """Make an environment of a folder of tasks and the words of an agent. Returns the tasks, and those left out."""
    Sandbox().require()
    tasks, left_out = {}, {}
    for path in sorted(Path(folder).glob("*/task.toml")):
        try:
            tasks[path.parent.name] = Task(path.parent)
        except (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError) as error:
            left_out[path.parent.name] = f"{type(error).__name__}: {error}"
    if not tasks:
        raise ValueError(f"no task of {folder} runs here: {left_out or 'none has a task.toml'}")
    places = {place for task in tasks.values() for place in task.places}
    limits = SandboxLimits(**SIZES, disk_mb=256, files=10_000)
    fa.register(
        "my/Harbor-v0",
        entry_point=fa.Program,
        program=["bash", "begin.sh", *agent],
        tasks=list(tasks),
        files=lambda name: tasks[name].start | tasks[name].begin,
        reward=lambda name, result: tasks[name].paid(inside(result.folder)),
        sandbox=Sandbox(limits=limits, import_paths=(*READS, *reads), folders=folders(places)),
    )
    return list(tasks), left_out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--agent", required=True, help="it finds the instruction on its standard input")
    parser.add_argument("--reads", action="append", default=[], help="a folder that the agent reads, of its own code")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/harbor_tasks")
    args = parser.parse_args()
    files, left_out = register(args.folder, shlex.split(args.agent), args.reads)
    print(f"{len(files)} tasks: {files}; left out {len(left_out)}: {json.dumps(left_out, indent=1)}")
    with fa.GRPOTrainer(fa.Policy(args.model, name="agent"), out_dir=args.out) as trainer:
        print(trainer.fit("my/Harbor-v0", steps=args.steps).curve)
