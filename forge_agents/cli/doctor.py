"""Does every part of the stack work on this machine? Each is tried for real, in a process of its own.

In: nothing. Out: one `Check` per part: versions, seconds and, for a failure, what mends it. Waits for each process up
to a deadline, so that a part that hangs is a finding, too.
"""

from __future__ import annotations

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
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forge_agents.models import resolve as models

__all__ = ["Check", "main", "run_doctor"]

REINSTALL = "install the pinned set again: `make clean`, then `make venv`"


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
        name="actor",
        function="forge_agents.cli.probes:actor",
        deadline_s=60,
        fix="Monarch starts processes and talks to them over loopback: see that `localhost` resolves and that the "
        "process limit (`ulimit -u`) leaves room",
    ),
    Probe(
        name="tensor",
        function="forge_agents.cli.probes:tensor",
        deadline_s=90,
        fix="TorchStore passes tensors through shared memory: give /dev/shm some GB (in a container: --shm-size=4g)",
    ),
    Probe(
        name="engine step",
        function="forge_agents.cli.probes:engine_step",
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
        "torchvision does not fit torch: `.venv/bin/python -m pip uninstall -y torchvision torchaudio torchcodec`",
    ),
    ("No space left on device", "free space on the disk, or in /dev/shm, that the message names"),
    ("libcudart", "torch is the build for CUDA without CUDA's libraries: `make clean`, then `make venv`"),
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
    checks = [_python(), _compiler(), _cache()]
    checks += [_run(probe) for probe in probes]
    return checks


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
    for check in failed:
        console.print(f"[bold]{check.name}[/]: {escape(check.fix)}")
    console.print(f"{len(checks) - len(failed)} of {len(checks)} parts work")
    return 1 if failed else 0


# ---- in this process


def _python() -> Check:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13) and (sys.platform, platform.machine()) == ("linux", "x86_64")
    return Check(
        name="python",
        ok=fits,
        seconds=0.0,
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        fix=""
        if fits
        else "use Python 3.11 to 3.13 on Linux x86-64: the wheels of vLLM and Monarch are made for these",
    )


def _compiler() -> Check:
    found = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    return Check(
        name="C compiler",
        ok=found is not None,
        seconds=0.0,
        detail=found or "none of cc, gcc, clang is on the path",
        fix=""
        if found
        else "install one (Debian and Ubuntu: `apt install build-essential`): vLLM compiles models with it",
    )


def _cache() -> Check:
    folder = models.cache_folder()
    started = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as cause:
        seen = f"{folder} cannot be written: {cause.strerror}"
        fix = f"set {models.CACHE_VARIABLE} to a folder that you can write"
        return Check(name="model cache", ok=False, seconds=time.perf_counter() - started, detail=seen, fix=fix)
    free_gb = shutil.disk_usage(folder).free / 1e9
    return Check(
        name="model cache", ok=True, seconds=time.perf_counter() - started, detail=f"{folder}, {free_gb:.0f} GB free"
    )


# ---- in a process of its own


def _run(probe: Probe) -> Check:
    """Run the probe as ``python -m forge_agents.cli.doctor FUNCTION``; its last line of output is JSON."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "forge_agents.cli.doctor", probe.function],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that whatever the probe started can be ended with it
    )
    try:
        output, errors = process.communicate(timeout=probe.deadline_s)
        trouble = _trouble(process.returncode, errors)
    except subprocess.TimeoutExpired:
        output, trouble = "", f"no result within {probe.deadline_s:.0f} s"
    finally:
        _end_group(process)
    seconds = time.perf_counter() - started
    detail = _answer(output)
    if not trouble and detail is None:
        trouble = "it ended without an answer"
    if trouble:
        fix = next((fix for text, fix in KNOWN_TROUBLE if text in trouble), probe.fix)
        return Check(name=probe.name, ok=False, seconds=seconds, detail=trouble, fix=fix)
    return Check(name=probe.name, ok=True, seconds=seconds, detail=detail or "")


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # which is the usual case: all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _trouble(status: int, errors: str) -> str:
    """Why the process failed; empty if it did not."""
    if status == 0:
        return ""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"


def _answer(output: str) -> str | None:
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return answer["detail"] if isinstance(answer, dict) and "detail" in answer else None


def _probe(function: str) -> str:
    """What a probe says; an exception is its failure."""
    module, _, name = function.partition(":")
    if module == "import":
        found = importlib.import_module(name)
        return _version(name, found)
    said = getattr(importlib.import_module(module), name)()
    return str(said)


def _version(name: str, module: object) -> str:
    owners = importlib.metadata.packages_distributions().get(name, [])
    distribution = DISTRIBUTIONS.get(name) or (owners[0] if owners else "")
    version = importlib.metadata.version(distribution) if distribution else getattr(module, "__version__", "?")
    return f"{distribution or name} {version}"


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({"detail": _probe(sys.argv[1])}) + "\n")
