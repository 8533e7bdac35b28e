"""Shared by the measures: an environment of one turn, an engine without rollouts, clocks, child processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from forge_agents.envs.env import Outcome, TurnEnv
from forge_agents.policy import Policy, Sampling
from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime.processes import with_variable
from forge_agents.runtime.threads import all_or_first_error

if TYPE_CHECKING:
    from forge_agents.rollout.policy_engine import PolicyEngine
    from forge_agents.serving import EnginePlan
    from forge_agents.serving._wire import Answer, Request
    from forge_agents.types import Completion, EpisodeGroup

RUN_FILE = Path(__file__).with_name("run.py")
STATE_BYTES = 16
"""Bytes per parameter in the learner: weight, gradient and AdamW's two moments in float32."""
MARK = "FORGE_AGENTS_PERF"
"""Environment variable by which everything that a child started is found again."""
POLICY = "perf"
THREADS = 2
"""CPU threads of engines and peers."""
OPENMP = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

TOPICS = ("a lighthouse keeper", "two rival bakers", "a lost glacier", "the first clock", "an honest spy",
          "a village of cats", "the deepest mine", "a train at night")  # fmt: skip
PROMPTS = tuple(f"Write a very long story about {topic}, with ten long chapters." for topic in TOPICS)
"""Some 46 tokens each with SmolLM2's chat template. Stories rarely end within 128 tokens."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Model and sizes of a measurement."""

    model: str
    """Folder of the model."""
    quick: bool = False
    """Small sizes and an eager engine, only to test the script."""
    peers: tuple[str, ...] = ()
    """Peers that take minutes: ``trl``."""
    scale: int = 1
    """Factor of the number of answers to a prompt, more than 1 on a GPU."""

    @property
    def prompts(self) -> tuple[str, ...]:
        return PROMPTS[:2] if self.quick else PROMPTS

    @property
    def siblings(self) -> int:
        return (4 if self.quick else 8) * self.scale

    @property
    def step_tokens(self) -> int:
        """New tokens of W, at most."""
        return 8 if self.quick else 32

    @property
    def rollout_tokens(self) -> int:
        return 8 if self.quick else 128

    @property
    def warm_ups(self) -> int:
        return 1 if self.quick else 3

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3


class Story(TurnEnv):
    """One seat, one turn. The reward is a number that only equal texts share, so that no group is without variance."""

    possible_agents = ("writer",)

    def __init__(self, prompt: str) -> None:
        super().__init__(max_turns=1)
        self._prompt = prompt

    def setup(self, rng: np.random.Generator) -> None:
        pass

    def instructions(self, agent: str) -> str:
        return ""

    def observe_text(self, agent: str) -> str:
        return self._prompt

    def act(self, agent: str, action: str) -> Outcome:
        return Outcome(rewards={agent: zlib.crc32(action.encode()) / 2**32}, done=True)


def policy(options: Options, max_tokens: int) -> Policy:
    return Policy(options.model, name=POLICY, sampling=Sampling(max_tokens=max_tokens))


async def play_all(options: Options, served: Mapping[str, PolicyEngine], max_tokens: int) -> list[EpisodeGroup]:
    """Every prompt with all its siblings, all alive at once."""
    seats = policy(options, max_tokens)

    def rollout(prompt: str) -> Rollout:
        return Rollout(make_env=lambda: Story(prompt), env_id="perf/Story", policies=seats, engines=served)

    return await all_or_first_error(
        rollout(prompt).group(seed, options.siblings) for seed, prompt in enumerate(options.prompts)
    )


def goal(value: float, wanted: float, *, at_most: bool) -> dict[str, Any]:
    """A number, what it should be, and whether it is."""
    reached = value <= wanted if at_most else value >= wanted
    return {"value": round(value, 4), "goal": f"{'<=' if at_most else '>='} {wanted:g}", "reached": reached}


def median(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every column."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def peak_rss(pid: int) -> int:
    """Peak resident memory of a process in bytes. Shared pages count in each process that touched them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def num_parameters(model: str) -> int:
    """Parameters of a model folder, tied ones once."""
    from forge_agents.serving import _shapes

    shapes = _shapes.expected_shapes(model) or {}
    return sum(int(np.prod(shape)) for shape in shapes.values())


class DirectEngine:
    """An engine's thread in this process, for requests that need no rollout."""

    def __init__(self, config: EnginePlan) -> None:
        from forge_agents.serving._loop import EngineThread

        self._answers: queue.SimpleQueue[list[Answer] | BaseException] = queue.SimpleQueue()
        self._thread = EngineThread(config, deliver=self._answers.put, on_death=self._answers.put)
        self._thread.ready.result(600)

    def __enter__(self) -> DirectEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.close(10)

    def answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Send all requests at once and wait for their answers."""
        self._thread.add(list(requests))
        completions: list[Completion] = []
        while len(completions) < len(requests):
            arrived = self._answers.get(timeout=300)
            if isinstance(arrived, BaseException):
                raise arrived
            for answer in arrived:
                if answer.completion is None:
                    raise RuntimeError(f"the engine refused a request: {answer.error}")
                completions.append(answer.completion)
        return completions


class StageClock:
    """Wall seconds and the CPU seconds of several processes, stage by stage."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.row: dict[str, float] = {}

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before, started = self._cpu(), time.perf_counter()
        yield
        self.row[f"{name}_s"] = time.perf_counter() - started
        spent = {who: after - before[who] for who, after in self._cpu().items()}
        self.row[f"{name}_cpu_s"] = sum(spent.values())
        for who, seconds in spent.items():
            self.row[f"cpu_s_of_{who}"] = self.row.get(f"cpu_s_of_{who}", 0.0) + seconds


class ChildFailedError(RuntimeError):
    """A child failed or missed its deadline. The message holds the end of its output."""


def in_child(
    function: Callable[..., Any],
    options: Options,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Run a function, or coroutine, of one of these modules in a fresh process and return its JSON result.

    Args:
        function: Module-level; called with `options` and `arguments`.
        timeout_s: Deadline.
        env: Variables that exist before the child's Python starts.
    """
    name = f"{function.__module__}:{function.__name__}"
    with tempfile.TemporaryDirectory(prefix="forge-perf-") as folder:
        out, log = Path(folder, "result.json"), Path(folder, "log")
        # vLLM's environment has PYTHONSAFEPATH, with which Python does not find the modules next to a script
        path = os.pathsep.join(filter(None, [str(RUN_FILE.parent), os.environ.get("PYTHONPATH")]))
        given = json.dumps([dataclasses.asdict(options), arguments])
        child, mark = start_marked(str(RUN_FILE), name, str(out), given, log=log, **(env or {}), PYTHONPATH=path)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildFailedError(f"{name} did not finish within {timeout_s:g} s; it printed:{_tail(log)}") from None
        finally:
            if child.poll() is None:
                child.kill()
            child.wait(30)
            kill_marked(mark)
        if code != 0 or not out.is_file():
            raise ChildFailedError(f"{name} ended with code {code}; it printed:{_tail(log)}")
        return json.loads(out.read_text())


def start_marked(script: str, *words: str, log: Path, **env: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start ``script --child *words`` in its own session. Returns it and the value of `MARK` in its environment."""
    mark = secrets.token_hex(8)
    with log.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, script, "--child", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **env, MARK: mark},
            start_new_session=True,
        )
    return child, mark


def _tail(log: Path) -> str:
    return "\n" + log.read_text(errors="replace")[-3000:]


def kill_marked(mark: str, *, grace_s: float = 5.0) -> list[int]:
    """Wait until all processes with this `MARK` have ended. Kill and return those that remain after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while (left := [process.pid for process in with_variable(MARK, mark)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        sys.stderr.write(f"process {pid} outlived what started it and was killed\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines, none without the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def markdown(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
