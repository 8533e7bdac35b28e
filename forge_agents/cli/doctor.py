"""Does every part of the stack work on this machine? Each is tried for real, in a process of its own.

In: nothing. Out: one `Check` per part: versions, seconds and, for a failure, what mends it. Waits for each process up
to a deadline, so that a part that hangs is a finding, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.errors import DISTRIBUTION
from forge_agents.files import CACHE_VARIABLE, cache_folder
from forge_agents.models import resolve as models
from forge_agents.runtime.deaths import death

if TYPE_CHECKING:
    import torch

REINSTALL = (
    "install the pinned set again: `make clean`, then `make venv`; in a project of your own, a new environment with "
    f"{DISTRIBUTION}[cpu] or [gpu] from a clone or a wheel, then `forge-agents setup`"
)
COMPLETE = "run `forge-agents setup`: it installs and removes what pip and uv cannot resolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What came of trying one part."""

    name: str
    ok: bool
    seconds: float
    """Wall time, start of the process included where the part has one."""
    detail: str
    """Versions and values seen, or what went wrong."""
    fix: str = ""
    """What to do; empty if and only if `ok`."""

    def __post_init__(self) -> None:
        if self.ok == bool(self.fix):
            raise ValueError(
                f"check {self.name!r} with ok={self.ok} has fix={self.fix!r}; failures have one, others none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A part that is tried in a process of its own."""

    name: str
    function: str
    """``module:function``, called without arguments; returns what to show."""
    deadline_s: float
    fix: str
    """What usually mends it."""


def _library(name: str) -> Probe:
    return Probe(name=name, function=f"import:{name}", deadline_s=120, fix=REINSTALL)


PROBES: tuple[Probe, ...] = (
    *(_library(name) for name in ("torch", "tensordict", "pettingzoo", "transformers", "monarch", "torchstore")),
    *(_library(name) for name in ("torchtitan", "vllm")),
    Probe(
        name="built-in model",
        function="forge_agents.cli.doctor:built_in_model",
        deadline_s=30,
        fix=COMPLETE,
    ),
    Probe(
        name="actor",
        function="forge_agents.cli.doctor:actor",
        deadline_s=60,
        fix="Monarch starts processes and talks to them over loopback: see that `localhost` resolves and that the "
        "process limit (`ulimit -u`) leaves room",
    ),
    Probe(
        name="tensor",
        function="forge_agents.cli.doctor:tensor",
        deadline_s=90,
        fix="TorchStore passes tensors through shared memory: give /dev/shm some GB (in a container: --shm-size=4g)",
    ),
    Probe(
        name="engine step",
        function="forge_agents.cli.doctor:engine_step",
        deadline_s=180,
        fix="if vLLM ran out of memory, free 2 GB; if it lacks an instruction, it needs a CPU with AVX2; else "
        + REINSTALL,
    ),
    Probe(
        name="learner step",
        function="forge_trainers.learner.probes:learner_step",
        deadline_s=180,
        fix="free 2 GB of memory, or " + REINSTALL,
    ),
)

KNOWN_TROUBLE = (
    (
        "torchvision::nms",
        f"torchvision does not fit torch: {COMPLETE}",
    ),
    ("No module named 'torchstore'", COMPLETE),
    ("forge-agents setup", COMPLETE),
    ("No module named 'vllm'", f"install an engine: pip install '{DISTRIBUTION}[cpu]' or '{DISTRIBUTION}[gpu]'"),
    ("No space left on device", "free space on the disk, or in /dev/shm, that the message names"),
    ("libcudart", f"torch is the build for CUDA without CUDA's libraries: {REINSTALL}"),
    ("No module named", REINSTALL),
    ("GLIBCXX", "the C++ library of this system is too old: use a system with GCC 11's libraries or newer"),
)
"""What a failure's text may contain -> what mends it, before the probe's own advice."""

DISTRIBUTIONS = {"monarch": "torchmonarch"}


def run_doctor(probes: Sequence[Probe] = PROBES) -> list[Check]:
    """Try every part, one after the other; about a minute on two cores.

    Returns:
        The checks in order; a part that fails does not keep later ones from being tried.
    """
    return [_python(), _compiler(), _cache(), *map(_run, probes)]


def main() -> int:
    """Print the checks as a table. Returns 0 if all passed, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    with console.status("trying every part, about a minute"):
        checks = run_doctor()
    table = Table("part", "", "s", "seen")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]fails[/]"
        table.add_row(check.name, mark, f"{check.seconds:.1f}", escape(check.detail))
    console.print(table)
    failed = [check for check in checks if not check.ok]
    for fix in dict.fromkeys(check.fix for check in failed):  # what mends several parts is said once
        names = [check.name for check in failed if check.fix == fix]
        console.print(f"[bold]{', '.join(names)}[/]{f' ({len(names)})' * (len(names) > 1)}: {escape(fix)}")
    console.print(f"{len(checks)} parts: {len(checks) - len(failed)} work, {len(failed)} failed")
    return 1 if failed else 0


# ---- in this process


def _python() -> Check:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13) and (sys.platform, platform.machine()) == ("linux", "x86_64")
    seen = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    cure = "use Python 3.11 to 3.13 on Linux x86-64: the wheels of vLLM and Monarch are made for these"
    return Check(name="python", ok=fits, seconds=0.0, detail=seen, fix="" if fits else cure)


def _compiler() -> Check:
    found = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    seen = found or "none of cc, gcc, clang is on the path"
    cure = "install one (Debian and Ubuntu: `apt install build-essential`): vLLM compiles models with it"
    return Check(name="C compiler", ok=found is not None, seconds=0.0, detail=seen, fix="" if found else cure)


def _cache() -> Check:
    folder, started = cache_folder(), time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.touch()
        probe.unlink()
        seen, cure = f"{folder}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free", ""
    except OSError as cause:
        seen = f"{folder} cannot be written: {cause.strerror}"
        cure = f"set {CACHE_VARIABLE} to a folder that you can write"
    return Check(name="model cache", ok=not cure, seconds=time.perf_counter() - started, detail=seen, fix=cure)


# ---- in a process of its own


def _run(probe: Probe) -> Check:
    """Run the probe as ``python -m forge_agents.cli.doctor FUNCTION``; its last line of output is JSON."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "forge_agents.cli.doctor", probe.function],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that whatever the probe started can be ended with it
    )
    output, trouble = "", f"no result within {probe.deadline_s:.0f} s"
    try:
        output, errors = process.communicate(timeout=probe.deadline_s)
        trouble = _trouble(process.returncode, errors)
    except subprocess.TimeoutExpired:
        pass
    finally:  # after Ctrl-C, too
        with contextlib.suppress(ProcessLookupError):  # which is the usual case: all of the group have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    seconds = time.perf_counter() - started
    detail = "" if trouble else _answer(output)
    if detail is None:
        trouble = "it ended without an answer"
    fix = next((fix for text, fix in KNOWN_TROUBLE if text in trouble), probe.fix) if trouble else ""
    return Check(name=probe.name, ok=not trouble, seconds=seconds, detail=trouble or str(detail), fix=fix)


def _trouble(status: int, errors: str) -> str:
    """Why the process failed; empty if it did not."""
    if status < 0:
        meaning = death(status, None).meaning
        return f"killed by {signal.Signals(-status).name}{f': {meaning}' * bool(meaning)}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit status {status}") if status else ""


def _answer(output: str) -> str | None:
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return answer.get("detail") if isinstance(answer, dict) else None


def _probe(function: str) -> str:
    """What a probe says; an exception is its failure."""
    module, _, name = function.partition(":")
    if module != "import":
        return str(getattr(importlib.import_module(module), name)())
    library = importlib.import_module(name)
    owners = importlib.metadata.packages_distributions().get(name, [])
    distribution = DISTRIBUTIONS.get(name) or (owners[0] if owners else "")
    version = importlib.metadata.version(distribution) if distribution else getattr(library, "__version__", "?")
    return f"{distribution or name} {version}"


# ---- parts: each says what was seen; an exception is the finding


def built_in_model() -> str:
    """The file that the demo's model is made of."""
    files = [models.packaged_file(name)[0] for name in models.BUILTIN]
    return ", ".join(f"{file.name}, {file.stat().st_size / 1e6:.0f} MB" for file in files)


def actor() -> str:
    """A message to an actor in a process of its own, and back."""
    from forge_agents.runtime import mesh
    from forge_agents.testing._echo import Echo

    async def ask() -> str:
        async with mesh.session():
            echo = mesh.spawn_procs("doctor").spawn("echo", Echo)
            pid = await mesh.with_deadline(echo.pid.call_one(), 45, who="doctor", what="its first answer")
            started = time.perf_counter()
            await mesh.with_deadline(echo.pid.call_one(), 10, who="doctor", what="its second answer")
            return f"process {pid} answers in {1e3 * (time.perf_counter() - started):.1f} ms"

    return asyncio.run(ask())


def tensor() -> str:
    """A tensor into the weight store and back."""
    import torch

    from forge_agents.runtime import mesh
    from forge_agents.weights import Publisher, Subscriber, WeightStore

    sent, got = {"weight": torch.arange(4_000_000, dtype=torch.float32)}, {}

    def keep(tensors: Mapping[str, torch.Tensor], version: int) -> None:
        got.update({name: tensor.clone() for name, tensor in tensors.items()})

    async def carry() -> str:
        async with mesh.session():
            store = await WeightStore.start(timeout_s=60)
            started = time.perf_counter()
            await Publisher(store.ref, "doctor", dtype=torch.float32).publish(sent, 1)
            published = time.perf_counter()
            await Subscriber(store.ref, "doctor").fetch(keep)
            fetched = time.perf_counter()
            await store.stop()
        return f"16 MB put in {1e3 * (published - started):.0f} ms, got in {1e3 * (fetched - published):.0f} ms"

    said = asyncio.run(carry())
    if not torch.equal(got["weight"], sent["weight"]):
        raise RuntimeError("what came out of the store is not what went in")
    return said


def engine_step() -> str:
    """Eight tokens from vLLM, in an actor, with a tiny model."""
    from forge_agents.models.tiny import tiny_model
    from forge_agents.policy import Sampling
    from forge_agents.runtime import mesh
    from forge_agents.serving import Engine, EngineConfig

    async def sample(model: Path) -> str:
        config = EngineConfig(
            model=str(model), max_model_len=256, max_num_seqs=2, kv_cache_gb=0.1, enforce_eager=True, threads=1
        )
        async with mesh.session():
            started = time.perf_counter()
            engine = await Engine.start(config, name="doctor", timeout_s=150)
            ready = time.perf_counter()
            completion = await engine.generate(list(b"hello"), Sampling(max_tokens=8), timeout_s=60)
            took_ms = 1e3 * (time.perf_counter() - ready)
            await engine.stop()
        return f"{len(completion.token_ids)} tokens in {took_ms:.0f} ms, ready after {ready - started:.0f} s"

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(sample(tiny_model(Path(folder))))


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({"detail": _probe(sys.argv[1])}) + "\n")
