"""Tests of the installation: each part of the stack runs in its own process, with a timeout.

A part that hangs is therefore reported like one that fails.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_agents.errors import DISTRIBUTION
from forge_agents.files import CACHE_VARIABLE, cache_folder
from forge_agents.imports import plugin_object
from forge_agents.models import resolve as models
from forge_agents.runtime.deaths import death

REINSTALL = (
    "install the pinned set again: `make clean`, then `make venv`. In a project of your own, a new environment with "
    f"{DISTRIBUTION}[cpu] or [gpu] from a clone or a wheel, then `forge-agents doctor --fix`"
)
COMPLETE = "run `forge-agents doctor --fix`: it installs and removes what pip and uv cannot resolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of testing one part."""

    name: str
    ok: bool
    seconds: float
    """Wall time, including the start of the process."""
    detail: str
    """Versions and values, or the failure."""
    fix: str
    """Remedy of a failure. Empty if `ok`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A part that is tested in its own process."""

    name: str
    function: str
    """``module:function``, called without arguments. Returns the text to show."""
    timeout_s: float
    fix: str
    """Usual remedy."""


_LIBRARIES = ("torch", "tensordict", "pettingzoo", "transformers", "monarch", "torchstore", "torchtitan", "vllm")
PROBES: tuple[Probe, ...] = (
    *(Probe(name, f"import:{name}", 120, REINSTALL) for name in _LIBRARIES),
    Probe("built-in model", "forge_agents.cli.doctor:built_in_model", 30, COMPLETE),
    Probe(
        "actor",
        "forge_agents.cli.doctor:actor",
        60,
        "Monarch starts processes and connects to them over loopback: check that `localhost` resolves and that the "
        "process limit (`ulimit -u`) is high enough",
    ),
    Probe(
        "tensor",
        "forge_agents.cli.doctor:tensor",
        90,
        "TorchStore passes tensors through shared memory: give /dev/shm some GB (in a container: --shm-size=4g)",
    ),
    Probe(
        "engine step",
        "forge_agents.cli.doctor:engine_step",
        180,
        "if vLLM ran out of memory, free 2 GB. If it lacks an instruction, it needs a CPU with AVX2. Otherwise "
        f"{REINSTALL}",
    ),
    Probe("learner step", "forge_trainers.learner.probes:learner_step", 180, f"free 2 GB of memory, or {REINSTALL}"),
)

KNOWN_FAILURES = (
    ("torchvision::nms", f"torchvision does not fit torch: {COMPLETE}"),
    ("No module named 'torchstore'", COMPLETE),
    ("forge-agents doctor --fix", COMPLETE),
    ("No module named 'vllm'", f"install an engine: pip install '{DISTRIBUTION}[cpu]' or '{DISTRIBUTION}[gpu]'"),
    ("No space left on device", "free space on the disk, or in /dev/shm, that the message names"),
    ("libcudart", f"torch is the build for CUDA without CUDA's libraries: {REINSTALL}"),
    ("No module named", REINSTALL),
    ("GLIBCXX", "the C++ library of this system is too old: use a system with GCC 11's libraries or newer"),
)
"""Parts of failure messages, and remedies that replace the remedy of the probe."""

DISTRIBUTIONS = {"monarch": "torchmonarch"}


def run_doctor(probes: Sequence[Probe] = PROBES) -> list[Check]:
    """Test all parts in order. About a minute on two cores. A failure does not stop the tests."""
    return [_python(), _compiler(), _cache(), *map(_run, probes)]


def main() -> int:
    """Print the checks as a table. Returns 0 if all passed, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    with console.status("testing every part, about a minute"):
        checks = run_doctor()
    table = Table("part", "", "s", "details")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]fails[/]"
        table.add_row(check.name, mark, f"{check.seconds:.1f}", escape(check.detail))
    console.print(table)
    failed = [check for check in checks if not check.ok]
    for fix in dict.fromkeys(check.fix for check in failed):
        names = [check.name for check in failed if check.fix == fix]
        console.print(f"[bold]{', '.join(names)}[/]{f' ({len(names)})' * (len(names) > 1)}: {escape(fix)}")
    console.print(f"{len(checks)} parts: {len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


# ---- checks in this process


def _python() -> Check:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13) and (sys.platform, platform.machine()) == ("linux", "x86_64")
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    fix = "use Python 3.11 to 3.13 on Linux x86-64: vLLM and Monarch have wheels for these only"
    return Check(name="python", ok=fits, seconds=0.0, detail=detail, fix="" if fits else fix)


def _compiler() -> Check:
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    detail = compiler or "none of cc, gcc, clang is on the path"
    fix = "install one (Debian and Ubuntu: `apt install build-essential`): vLLM compiles models with it"
    return Check(name="C compiler", ok=compiler is not None, seconds=0.0, detail=detail, fix="" if compiler else fix)


def _cache() -> Check:
    folder, started = cache_folder(), time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.touch()
        probe.unlink()
        detail, fix = f"{folder}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free", ""
    except OSError as cause:
        detail = f"{folder} is not writable: {cause.strerror}"
        fix = f"set {CACHE_VARIABLE} to a writable folder"
    return Check(name="model cache", ok=not fix, seconds=time.perf_counter() - started, detail=detail, fix=fix)


# ---- checks in a new process


def _run(probe: Probe) -> Check:
    """Run the probe as ``python -m forge_agents.cli.doctor FUNCTION``. Its last line of output is JSON."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "forge_agents.cli.doctor", probe.function],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that the children of the probe can be killed with it
    )
    ok, detail = False, f"no result within {probe.timeout_s:.0f} s"
    try:
        output, errors = process.communicate(timeout=probe.timeout_s)
        ok, detail = _result(process.returncode, output, errors)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):  # usually all processes of the group have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    fix = next((fix for text, fix in KNOWN_FAILURES if text in detail), probe.fix)
    return Check(name=probe.name, ok=ok, seconds=time.perf_counter() - started, detail=detail, fix="" if ok else fix)


def _result(status: int, output: str, errors: str) -> tuple[bool, str]:
    """Return whether the process succeeded, and its result or failure."""
    if status < 0:
        meaning = death(status, None).meaning
        return False, f"killed by {signal.Signals(-status).name}{f': {meaning}' * bool(meaning)}"
    if status:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return False, lines[-1] if lines else f"exit status {status}"
    try:
        return True, str(json.loads(output.strip().splitlines()[-1])["detail"])
    except (ValueError, LookupError, TypeError):
        return False, "the process ended without a result"


def _probe(function: str) -> str:
    """Run a probe in this process."""
    module, _, name = function.partition(":")
    if module != "import":
        return str(plugin_object(function)())
    library = importlib.import_module(name)
    owners = importlib.metadata.packages_distributions().get(name, [])
    distribution = DISTRIBUTIONS.get(name) or (owners[0] if owners else "")
    version = importlib.metadata.version(distribution) if distribution else getattr(library, "__version__", "?")
    return f"{distribution or name} {version}"


# ---- probes: each returns details; an exception is the failure


def built_in_model() -> str:
    """Find the file of the demo's model."""
    files = [models.packaged_file(name)[0] for name in models.BUILTIN]
    return ", ".join(f"{file.name}, {file.stat().st_size / 1e6:.0f} MB" for file in files)


def actor() -> str:
    """Send messages to an actor in another process."""
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
    """Send a tensor through the weight store."""
    import torch

    from forge_agents.runtime import mesh
    from forge_agents.weights import WeightStore

    sent, received = {"weight": torch.arange(4_000_000, dtype=torch.float32)}, {}

    async def transfer() -> str:
        async with mesh.session():
            store = await WeightStore.start(timeout_s=60)
            started = time.perf_counter()
            await store.ref.publisher("doctor", dtype=torch.float32).publish(1, sent)
            published = time.perf_counter()
            async with store.ref.subscriber("doctor").load(1) as weights:
                received.update({name: tensor.clone() for name, tensor in weights.tensors.items()})
            fetched = time.perf_counter()
            await store.stop()
        publish_ms, fetch_ms = 1e3 * (published - started), 1e3 * (fetched - published)
        return f"16 MB published in {publish_ms:.0f} ms, fetched in {fetch_ms:.0f} ms"

    detail = asyncio.run(transfer())
    if not torch.equal(received["weight"], sent["weight"]):
        raise RuntimeError("the store returned a different tensor")
    return detail


def engine_step() -> str:
    """Sample eight tokens from a tiny model with vLLM."""
    from forge_agents.models.tiny import tiny_model
    from forge_agents.policy import Sampling
    from forge_agents.runtime import mesh
    from forge_agents.serving import EnginePlan, EngineProcess

    async def sample(model: Path) -> str:
        config = EnginePlan(
            model=str(model), max_model_len=256, max_num_seqs=2, kv_cache_gb=0.1, enforce_eager=True, threads=1
        )
        async with mesh.session():
            started = time.perf_counter()
            engine = await EngineProcess.start(config, name="doctor", timeout_s=150)
            ready = time.perf_counter()
            completion = await engine.generate(list(b"hello"), Sampling(max_tokens=8), timeout_s=60)
            took_ms = 1e3 * (time.perf_counter() - ready)
            await engine.stop()
        return f"{len(completion.token_ids)} tokens in {took_ms:.0f} ms, ready after {ready - started:.0f} s"

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(sample(tiny_model(Path(folder))))


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({"detail": _probe(sys.argv[1])}) + "\n")
